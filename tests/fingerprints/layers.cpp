#include "numbers.hpp"
#include "prints.hpp"
#include "random_numbers.hpp"

#include <attn/attention/causal_backward.hpp>
#include <attn/layer/backward.hpp>
#include <attn/layer/feed_forward.hpp>
#include <attn/layer/multi_head.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/layer/sinusoidal.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/score/alibi.hpp>

#include <deque>

namespace attn::testing {

namespace {

/// Weights, and memory for their gradients.
class weights {
public:
    linear<float> matrix(index_t outputs, index_t inputs) {
        const auto weight = numbers(outputs * inputs, 0.1f), bias = numbers(outputs, 1);
        return {.weight = {weight.data(), {1, 1, outputs, inputs}, {0, 0, inputs, 1}}, .bias = bias};
    }
    layer_norm<float> norm(index_t channels) { return {numbers(channels, 1), numbers(channels, 1)}; }
    linear<float>::gradients gradients_of(const linear<float>& l) {
        const auto& s = l.weight.shape();
        return {{zeros(s.size()).data(), s, {0, 0, s.channels, 1}}, zeros(std::ssize(l.bias))};
    }
    norm_gradients<float> gradients_of(const layer_norm<float>& n) { return {{}, zeros(std::ssize(n.weight)), zeros(std::ssize(n.bias))}; }
    void print_gradients(named_prints& prints, const char* name) const {
        for (const auto& numbers : gradients_) prints.add(name, "backward", std::span<const float>(numbers));
    }

private:
    std::span<const float> numbers(index_t count, float limit) {
        auto& all = numbers_.emplace_back(count);
        for (auto& x : all) x = random_number(random_, limit);
        return all;
    }
    std::span<float> zeros(index_t count) { return gradients_.emplace_back(count); }

    std::mt19937 random_{7};
    std::deque<std::vector<float>> numbers_, gradients_;
};

/// Of several parts of sums, chunks of tokens, and channels that no register divides.
template <Scalar T>
void print_causal_convolution(named_prints& prints) {
    const shape s{2, 3, 1100, 37}, of_states{2, 3, 3, 37};
    const auto x = random_tensor<T>(s, 1), weights = random_tensor<T>({1, 111, 1, 4}, 2), bias = random_tensor<T>({1, 1, 1, 111}, 3),
               state = random_tensor<T>(of_states, 4), d_out = random_tensor<T>(s, 5), d_last_state = random_tensor<T>(of_states, 6);
    tensor<T> out(s), of_x(s), of_weights(weights.shape()), of_bias(bias.shape()), of_state(of_states);
    const causal_convolution op{.weights = weights, .bias = std::span(bias.data(), 111), .activation = silu{}, .first_state = state};
    convolve(op, x, out);
    prints.add("causal_convolution", "forward", out);
    backward(op, x, d_out, {of_x, of_weights, std::span(of_bias.data(), 111), of_state, d_last_state});
    for (const auto* gradient : {&of_x, &of_weights, &of_bias, &of_state}) prints.add("causal_convolution", "backward", *gradient);
}

constexpr index_t channels = 48, tokens = 37;

void print_block(named_prints& prints, const char* name, bool post_norm) {
    constexpr index_t heads = 4, kv_heads = 2, d = 12;
    weights w;
    const rotary<float> rotation(tokens, rotary_frequencies::yarn(d, 4, 16));
    const auto slopes = alibi_slopes(heads);
    const softmax_attention attention{.score = alibi(slopes), .pattern = causal{}};
    using attention_layer = multi_head<float, std::remove_const_t<decltype(attention)>>;
    using block_type = transformer_block<layer_norm<float>, attention_layer, feed_forward<float, silu>>;
    const block_type block{.attention_norm = w.norm(channels),
                           .attention = {.heads = heads,
                                         .kv_heads = kv_heads,
                                         .q = w.matrix(heads * d, channels),
                                         .k = w.matrix(kv_heads * d, channels),
                                         .v = w.matrix(kv_heads * d, channels),
                                         .out = w.matrix(channels, heads * d),
                                         .attention = attention,
                                         .rotation = &rotation},
                           .feed_forward_norm = w.norm(channels),
                           .feed_forward = {.up = w.matrix(2 * channels, channels),
                                            .down = w.matrix(channels, 2 * channels),
                                            .gate = w.matrix(2 * channels, channels)},
                           .post_norm = post_norm};
    const auto x = random_tensor<float>({2, 1, tokens, channels}, 1), d_out = random_tensor<float>(x.shape(), 2);
    const layer_inputs<float> in{x};
    tensor<float> out(x.shape()), of_x(x.shape());
    workspace kept(kept_bytes(block, in));
    forward(block, in, out, kept);
    prints.add(name, "forward", out);

    layer_gradients<block_type> wanted{.tokens = of_x};
    auto& of = wanted.parameters;
    of.attention_norm = w.gradients_of(block.attention_norm);
    of.attention.q = w.gradients_of(block.attention.q);
    of.attention.k = w.gradients_of(block.attention.k);
    of.attention.v = w.gradients_of(block.attention.v);
    of.attention.out = w.gradients_of(block.attention.out);
    of.feed_forward_norm = w.gradients_of(block.feed_forward_norm);
    of.feed_forward.up = w.gradients_of(block.feed_forward.up);
    of.feed_forward.down = w.gradients_of(block.feed_forward.down);
    of.feed_forward.gate = w.gradients_of(block.feed_forward.gate);
    backward(block, in, kept, d_out, wanted);
    prints.add(name, "backward", of_x);
    w.print_gradients(prints, name);
}

} // namespace

void print_layers(named_prints& prints) {
    print_causal_convolution<float>(prints);
    if constexpr (is_tested<double>) print_causal_convolution<double>(prints);
    tensor<float> places({1, 1, tokens, channels});
    fill_sinusoidal_positions<float>(places, 1000);
    prints.add("sinusoidal_positions", "forward", places);
    print_block(prints, "transformer_block", false);
    print_block(prints, "transformer_block_post_norm", true);
}

} // namespace attn::testing
