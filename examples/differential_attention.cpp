// Differential attention: the difference of two softmaxes cancels what both give to irrelevant keys. It is talking-heads attention whose second
// mixing subtracts: weights of head e = weights of head 2 e - lambda * weights of head 2 e + 1. Ye et al. 2024, "Differential Transformer".
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/pattern/causal.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace {

using attn::index_t, attn::tensor;

constexpr index_t heads = 4, key_channels = 16, value_channels = 32, tokens = 50;

} // namespace

int main() {
    const auto q = tensor<float>::random({.heads = 2 * heads, .tokens = tokens, .channels = key_channels}, 1);
    const auto k = tensor<float>::random({.heads = 2 * heads, .tokens = tokens, .channels = key_channels}, 2);
    const auto v = tensor<float>::random({.heads = heads, .tokens = tokens, .channels = value_channels}, 3);
    const double initial = 0.8 - 0.6 * std::exp(-0.3 * 4), lambda = initial; // of the fifth layer, before training moves it

    tensor<double> difference({.tokens = heads, .channels = 2 * heads});
    for (index_t e = 0; e < heads; ++e) {
        difference(0, 0, e, 2 * e) = 1;
        difference(0, 0, e, 2 * e + 1) = -lambda;
    }
    const attn::talking_heads_attention op{.weights_mix = difference, .pattern = attn::causal{}};
    auto out = attn::attend(op, q, k, v);

    // The same from two calls: batch entry s of the queries and keys is the s-th softmax of every head, and both read the same values.
    const auto halves = [](const tensor<float>& x) { // heads 2 e + s as head e of batch entry s
        const auto s = x.view().strides();
        return attn::tensor_view<const float>(x.data(), {2, heads, tokens, key_channels}, {s.heads, 2 * s.heads, s.tokens, s.channels});
    };
    const attn::tensor_view<const float> shared(v.data(), {2, heads, tokens, value_channels}, {0, v.view().strides().heads, value_channels, 1});
    const auto both = attn::attend(attn::softmax_attention{.pattern = attn::causal{}}, halves(q), halves(k), shared);
    float largest = 0;
    for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < tokens; ++i)
            for (index_t c = 0; c < value_channels; ++c)
                largest = std::max(largest, std::abs(out(0, h, i, c) - (both(0, h, i, c) - static_cast<float>(lambda) * both(1, h, i, c))));
    std::printf("lambda %.3f: one mixing and two softmaxes are %s\n", lambda, largest < 1e-5f ? "the same" : "DIFFERENT");

    // Each head is normalised by itself, and scaled as the paper does.
    const std::vector<float> scale(value_channels, static_cast<float>(1 - initial));
    attn::normalise(attn::rms_norm{.weight = scale}, out, out);
    double squares = 0;
    for (index_t c = 0; c < value_channels; ++c) squares += std::pow(static_cast<double>(out(0, 0, tokens - 1, c)), 2);
    std::printf("root mean square of a head's row: %.2f\n", std::sqrt(squares / value_channels));
}
