// Cross-attention: the tokens of a decoder attend to those of an encoder, all at once, and one by one beside keys and values that are made once.
#include <attn/core/tensor.hpp>
#include <attn/layer/cached.hpp>
#include <attn/layer/multi_head.hpp>

#include <algorithm>
#include <cstdio>

int main() {
    using attn::index_t;
    constexpr index_t heads = 4, width = 64, of_encoder = 96, sources = 50, targets = 12;
    auto matrix = [seed = 0u](index_t inputs) mutable { return attn::tensor<float>::random({1, 1, width, inputs}, ++seed, 0.2f); };
    const auto q = matrix(width), k = matrix(of_encoder), v = matrix(of_encoder), out = matrix(width);
    const attn::multi_head layer{.heads = heads, .q = attn::linear{q}, .k = attn::linear{k}, .v = attn::linear{v}, .out = attn::linear{out}};

    const auto encoded = attn::tensor<float>::random({.tokens = sources, .channels = of_encoder}, 11); // what is read,
    const auto tokens = attn::tensor<float>::random({.tokens = targets, .channels = width}, 12);        // what is written
    // Every target sees every source: with the residual, as a block has it.
    const auto together = attn::forward(layer, {.tokens = tokens, .residual = tokens, .context = encoded});

    // The first step makes the keys and values of the sources, and keeps them.
    attn::key_value_pool<float> pool({.kv_heads = heads, .key_channels = width / heads, .value_channels = width / heads}, 1);
    attn::sequence<float> kept(pool);
    index_t different = 0;
    for (index_t i = 0; i < targets; ++i) {
        const auto token = tokens.slice({.tokens = {i, 1}});
        const auto one = forward(layer, kept, {.tokens = token, .residual = token, .context = encoded});
        different += !std::equal(one.data(), one.data() + width, together.view().row(0, 0, i));
    }
    std::printf("%d sources kept, %d targets: %d differ from those made together\n", static_cast<int>(kept.size()), static_cast<int>(targets),
                static_cast<int>(different));
    return different != 0;
}
