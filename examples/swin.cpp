// Two blocks of a Swin transformer on an image: attention in windows with a learned bias, then in shifted windows, which join what the first
// kept apart.
#include <attn/layer/named_layers.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/layer/windowed.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/score/additive_bias.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>

namespace {

constexpr attn::index_t side = 28, window = 7, channels = 96, heads = 3;

/// Weights of two blocks by the names of Swin's files, random here; attn::read_safetensors reads trained ones.
attn::parameters random_model() {
    attn::parameters weights;
    std::mt19937 random(1);
    const auto add = [&](const std::string& name, const attn::parameters::extents& size, float spread) {
        const auto t = weights.add<float>(name, size);
        std::generate_n(t.data(), t.shape().size(), [&] { return spread * (static_cast<float>(random()) / 0x1p31f - 1); });
    };
    for (const std::string block : {"blocks.0.", "blocks.1."}) {
        add(block + "attn.relative_position_bias_table", {(2 * window - 1) * (2 * window - 1), heads}, 1);
        add(block + "attn.qkv.weight", {3 * channels, channels}, 0.2F);
        add(block + "attn.proj.weight", {channels, channels}, 0.2F);
        add(block + "mlp.fc1.weight", {4 * channels, channels}, 0.2F);
        add(block + "mlp.fc2.weight", {channels, 4 * channels}, 0.1F);
    }
    return weights;
}

/// The number of tokens whose rows differ.
attn::index_t tokens_that_differ(const attn::tensor<float>& a, const attn::tensor<float>& b) {
    attn::index_t count = 0;
    for (attn::index_t i = 0; i < a.shape().tokens; ++i)
        count += !std::equal(a.view().row(0, 0, i), a.view().row(0, 0, i) + channels, b.view().row(0, 0, i));
    return count;
}

} // namespace

int main() {
    auto weights = random_model();
    const auto bias_of = [&](const std::string& block) {
        const auto name = block + "attn.relative_position_bias_table";
        return attn::window_bias(weights.get<float>(name, weights.size(name)), window, window);
    };
    const auto first_bias = bias_of("blocks.0."), second_bias = bias_of("blocks.1.");
    const auto block_of = [&](const std::string& name, const attn::window_grid& grid, const auto& attention) {
        return attn::transformer_block{
            .attention_norm = attn::layer_norm<float>{},
            .attention = attn::windowed{.grid = grid, .layer = attn::get_multi_head<float>(weights, name + "attn.", heads, attention)},
            .feed_forward_norm = attn::layer_norm<float>{},
            .feed_forward = attn::get_feed_forward<float>(weights, name + "mlp.")};
    };
    const auto plain = attn::window_grid::square(side, window), shifted = attn::window_grid::square(side, window, window / 2);
    const auto first = block_of("blocks.0.", plain, attn::softmax_attention{.score = attn::additive_bias{first_bias}});
    const auto second = block_of("blocks.1.", shifted,
                                 attn::softmax_attention{.score = attn::additive_bias{second_bias}, .pattern = shifted.shift_segments()});

    auto x = attn::tensor<float>::random({.tokens = side * side, .channels = channels}, 7, 1);
    const auto after_first = attn::forward(first, {.tokens = x}), after_both = attn::forward(second, {.tokens = after_first});
    x(0, 0, 0, 0) += 1; // the token in the upper left corner
    const auto moved_first = attn::forward(first, {.tokens = x}), moved_both = attn::forward(second, {.tokens = moved_first});
    std::printf("%td x %td tokens of %td channels, windows of %td x %td\n", side, side, channels, window, window);
    std::printf("a token that changes reaches %td tokens in its window, and %td through the shifted windows\n",
                tokens_that_differ(after_first, moved_first), tokens_that_differ(after_both, moved_both));
}
