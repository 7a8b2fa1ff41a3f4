// Multi-head latent attention: the cache holds one short latent row a token, from which all heads make their keys and values. Its up-projections
// move to the queries and the result, so that attention reads the latent rows themselves: as keys with their rotary part, as values without.
// DeepSeek-AI 2024, DeepSeek-V2 (there: 128 heads, a latent of 512, 64 rotary channels).
#include <attn/attention/softmax_attention.hpp>
#include <attn/core/copy.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/pattern/causal.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace {

using attn::index_t, attn::tensor, attn::tensor_view;

constexpr index_t heads = 8, latent = 64, turned = 16, plain = 32, values = 32, prompt = 28, tokens = 40;

/// out[h, i] = W[h] x[h, i], or of its transpose; heads of x that are fewer are shared.
void multiply(const tensor<float>& w, bool transposed, const tensor_view<const float>& x, const tensor_view<float>& out) {
    const auto& s = out.shape();
    for (index_t h = 0; h < s.heads; ++h)
        for (index_t i = 0; i < s.tokens; ++i)
            for (index_t r = 0; r < s.channels; ++r) {
                float sum = 0;
                for (index_t c = 0; c < x.shape().channels; ++c)
                    sum += (transposed ? w(0, h, c, r) : w(0, h, r, c)) * x(0, x.shape().heads == 1 ? 0 : h, i, c);
                out(0, h, i, r) = sum;
            }
}

} // namespace

int main() {
    const auto up_keys = tensor<float>::random({.heads = heads, .tokens = plain, .channels = latent}, 1);
    const auto up_values = tensor<float>::random({.heads = heads, .tokens = values, .channels = latent}, 2);
    const attn::rotary<float> rotation(tokens, turned);

    // The cache: a row of latent and rotary channels for each token, one head for all.
    auto cache = tensor<float>::random({.tokens = tokens, .channels = latent + turned}, 3);
    const auto rotary_keys = cache.slice({.channels = {latent, turned}});
    attn::rotate(rotation, rotary_keys, 0, rotary_keys);
    auto queries = tensor<float>::random({.heads = heads, .tokens = tokens, .channels = plain + turned}, 4);
    const auto rotary_queries = queries.slice({.channels = {plain, turned}});
    attn::rotate(rotation, rotary_queries, 0, rotary_queries);
    const attn::softmax_attention op{.scale = 1 / std::sqrt(double{plain + turned}), .pattern = attn::causal{}};

    // To compare with: every head's keys and values written out.
    tensor<float> keys({.heads = heads, .tokens = tokens, .channels = plain + turned});
    tensor<float> all_values({.heads = heads, .tokens = tokens, .channels = values});
    const tensor_view<const float> rows = cache.view();
    multiply(up_keys, false, rows.slice({.channels = {0, latent}}), keys.slice({.channels = {0, plain}}));
    for (index_t h = 0; h < heads; ++h) attn::copy(rotary_keys, keys.slice({.heads = {h, 1}, .channels = {plain, turned}}));
    multiply(up_values, false, rows.slice({.channels = {0, latent}}), all_values.view());
    const auto expected = attn::attend(op, queries, keys, all_values);

    // The queries go to the latent space instead: W_q' = W_up^T q, with their rotary part behind.
    tensor<float> moved({.heads = heads, .tokens = tokens, .channels = latent + turned});
    multiply(up_keys, true, queries.slice({.channels = {0, plain}}), moved.slice({.channels = {0, latent}}));
    attn::copy(rotary_queries, moved.slice({.channels = {latent, turned}}));

    float largest = 0, difference = 0;
    const auto decode = [&](index_t first, index_t count) {
        const auto cached = rows.slice({.tokens = {0, first + count}});
        const auto some = moved.slice({.tokens = {first, count}});
        const auto of_latent = attn::attend(op, some, cached, cached.slice({.channels = {0, latent}}),
                                            attn::bottom_right(count, first + count));
        tensor<float> out({.heads = heads, .tokens = count, .channels = values});
        multiply(up_values, false, of_latent, out.view());
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < count; ++i)
                for (index_t c = 0; c < values; ++c) {
                    largest = std::max(largest, std::abs(expected(0, h, first + i, c)));
                    difference = std::max(difference, std::abs(out(0, h, i, c) - expected(0, h, first + i, c)));
                }
    };
    decode(0, prompt);
    for (index_t at = prompt; at < tokens; ++at) decode(at, 1);

    std::printf("cache: %td numbers a token, where %td heads of keys and values have %td\n", latent + turned, heads,
                heads * (plain + turned + values));
    std::printf("%td tokens of prompt, %td more one by one: %s\n", prompt, tokens - prompt,
                difference < 1e-5f * largest ? "the same as with heads written out" : "DIFFERENT from heads written out");
}
