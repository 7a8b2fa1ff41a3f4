// A hybrid model, as Qwen3-Next and Kimi Linear are: three layers of a gated delta rule, behind a short convolution and before a gate, to one
// of softmax attention. It reads a prompt in one call, then steps token by token, each layer beside what it keeps: a state whose size stays,
// or a cache that grows. Both ways give the same bits. What a step of each kind takes is plotted as the context grows.
//     example_hybrid_model [LONGEST CONTEXT]      (1024, if none is named)
#include <attn/attention/causal_convolution.hpp>
#include <attn/cache/recurrent_state.hpp>
#include <attn/core/copy.hpp>
#include <attn/layer/cached.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/pattern/causal.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using attn::index_t;
using rows = attn::tensor_view<const float>;

constexpr index_t width = 256, heads = 4, channels = width / heads, taps = 4;

attn::tensor<float> random_tensor(const attn::shape& shape, float limit) {
    static std::uint64_t seed = 0;
    return attn::tensor<float>::random(shape, ++seed, limit);
}
attn::tensor<float> random_matrix(index_t outputs, index_t inputs) {
    return random_tensor({1, 1, outputs, inputs}, std::sqrt(3 / static_cast<float>(inputs)));
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

/// What a layer of the delta rule keeps of a sequence: the last tokens, for its convolution, and a state for each head.
struct delta_memory {
    attn::tensor<float> last_tokens = attn::tensor<float>({1, 1, taps - 1, 3 * width});
    attn::recurrent_state<float> state = attn::recurrent_state<float>({1, heads, channels, channels});
};

/// A layer of the gated delta rule: x += out(norm(attention(q, k, v)) silu(gate(x))), where q, k and v go through a convolution, and each
/// token has a decay and a beta of its own.
struct delta_layer {
    attn::tensor<float> qkv = random_matrix(3 * width, width), gates = random_matrix(2 * heads, width),
                        output_gate = random_matrix(width, width), out = random_matrix(width, width),
                        convolution = random_tensor({1, 3 * width, 1, taps}, 0.5f);

    /// The next tokens (1, 1, n, width), one or many.
    void operator()(attn::tensor<float>& x, delta_memory& memory, const attn::execution& run) const {
        const auto n = x.shape().tokens;
        attn::tensor<float> h(x.shape()), mixed({1, 1, n, 3 * width}), log_decay({1, heads, n, 1}), beta(log_decay.shape());
        attn::normalise(attn::rms_norm<float>{}, x, h, run);
        const auto own_gates = attn::forward(attn::linear<float>{gates}, {h}, run),
                   open = attn::forward(attn::linear<float>{output_gate}, {h}, run);
        const attn::causal_convolution mix{
            .weights = convolution, .activation = attn::silu{}, .first_state = memory.last_tokens, .last_state = memory.last_tokens};
        attn::convolve(mix, attn::forward(attn::linear<float>{qkv}, {h}, run), mixed, run);

        const auto part = [&](index_t number) {
            return attn::split_heads(mixed.slice({.channels = {number * width, width}}), heads);
        };
        const auto q = part(0), k = part(1), v = part(2);
        attn::normalise(attn::unit_norm<float>{}, q, q, run);
        attn::normalise(attn::unit_norm<float>{}, k, k, run);
        for (index_t head = 0; head < heads; ++head)
            for (index_t i = 0; i < n; ++i) {
                log_decay(0, head, i, 0) = -0.1f * std::log1p(std::exp(own_gates(0, 0, i, head)));
                beta(0, head, i, 0) = sigmoid(own_gates(0, 0, i, heads + head));
            }
        attn::tensor<float> result(x.shape());
        const auto by_head = attn::split_heads(result, heads);
        const attn::recurrent_attention attention{.rule = attn::rule::gated_delta{.log_decay = log_decay, .beta = beta}};
        attn::attend(attention, attn::inputs<float>{q, k, v}, attn::outputs<float>{by_head}, memory.state, run);

        attn::normalise(attn::rms_norm<float>{}, by_head, by_head, run);
        for (index_t e = 0; e < result.shape().size(); ++e) result.data()[e] *= open.data()[e] * sigmoid(open.data()[e]);
        attn::forward(attn::linear<float>{out}, {.tokens = result, .residual = x}, x, run);
    }
};

/// A layer of softmax attention, beside a cache.
struct softmax_layer {
    attn::tensor<float> q = random_matrix(width, width), k = random_matrix(width, width), v = random_matrix(width, width),
                        out = random_matrix(width, width);

    void operator()(attn::tensor<float>& x, attn::sequence<float>& cache, const attn::execution& run) const {
        attn::tensor<float> h(x.shape());
        attn::normalise(attn::rms_norm<float>{}, x, h, run);
        const attn::multi_head<float, attn::softmax_attention<attn::causal>> attention{
            .heads = heads, .q = {q}, .k = {k}, .v = {v}, .out = {out}};
        attn::forward(attention, cache, {.tokens = h, .residual = x}, x, run);
    }
};

/// What each of the layers keeps of one sequence.
struct memory_of_layers {
    std::array<delta_memory, 3> states;
    attn::sequence<float> cache;
};

struct hybrid_model {
    std::array<delta_layer, 3> delta;
    softmax_layer softmax;
    attn::execution run = {};

    /// The last layer's tokens. seconds: of a layer of the delta rule, and of the softmax layer.
    attn::tensor<float> operator()(const rows& tokens, memory_of_layers& memory, std::array<double, 2>* seconds = nullptr) const {
        auto x = attn::copy(tokens);
        const auto begin = std::chrono::steady_clock::now();
        for (std::size_t l = 0; l < delta.size(); ++l) delta[l](x, memory.states[l], run);
        const auto between = std::chrono::steady_clock::now();
        softmax(x, memory.cache, run);
        const auto end = std::chrono::steady_clock::now();
        if (seconds)
            *seconds = {std::chrono::duration<double>(between - begin).count() / 3, std::chrono::duration<double>(end - between).count()};
        return x;
    }
};

} // namespace

int main(int count, char** arguments) {
    const auto longest = std::max<index_t>(128, count > 1 ? std::atol(arguments[1]) : 1024);
    attn::key_value_pool<float> pool({.kv_heads = heads, .key_channels = channels, .value_channels = channels}, longest / 128 + 8);
    const hybrid_model model{};
    const auto tokens = random_tensor({1, 1, longest, width}, 1);
    const auto some = [&](index_t first, index_t number) { return rows(tokens.slice({.tokens = {first, number}})); };

    bool same = true;
    {
        constexpr index_t prompt = 70, all = 100;
        memory_of_layers at_once{.states = {}, .cache = attn::sequence<float>(pool)},
            step_by_step{.states = {}, .cache = attn::sequence<float>(pool)};
        const auto whole = model(some(0, all), at_once);
        for (index_t first = 0; first < all; first += first == 0 ? prompt : 1) {
            const auto next = model(some(first, first == 0 ? prompt : 1), step_by_step);
            same = same && std::ranges::equal(next.elements(), std::span(whole.data() + first * width, next.elements().size()));
        }
        std::printf("%td tokens of prompt, %td more one by one: %s\n\n", prompt, all - prompt,
                    same ? "the same bits as all at once" : "DIFFERENT from all at once");
    }

    std::printf("A step of one token, in microseconds a layer\n%10s  %12s  %12s\n", "context", "delta rule", "softmax");
    memory_of_layers memory{.states = {}, .cache = attn::sequence<float>(pool)};
    constexpr index_t steps = 16;
    for (index_t context = 64, done = 0; context + steps <= longest; context *= 2) {
        if (context > done) static_cast<void>(model(some(done, context - done), memory));
        std::vector<double> delta, softmax;
        for (index_t step = 0; step < steps; ++step) {
            std::array<double, 2> seconds;
            static_cast<void>(model(some(context + step, 1), memory, &seconds));
            delta.push_back(seconds[0] * 1e6), softmax.push_back(seconds[1] * 1e6);
        }
        done = context + steps;
        std::ranges::sort(delta), std::ranges::sort(softmax);
        const auto of_delta = delta[steps / 2], of_softmax = softmax[steps / 2];
        const auto bar = [](double microseconds) {
            return std::string(static_cast<std::size_t>(std::clamp(8 * std::log2(microseconds / 16), 1.0, 90.0)), '#');
        };
        std::printf("%10td  %12.1f  %12.1f   delta   %s\n%40s softmax %s\n", context, of_delta, of_softmax, bar(of_delta).c_str(), "",
                    bar(of_softmax).c_str());
    }
    std::printf("(eight signs are twice the time)\n");
    return same ? 0 : 1;
}
