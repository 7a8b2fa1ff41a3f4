// The definition of the depthwise convolution and its gradient: direct sums.
#pragma once

#include "../core/tensor_view.hpp"

#include <algorithm>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// A grid of tokens, row-major, and where its kernel begins: output (y, x) reads inputs (y - top + ky, x - left + kx).
struct grid {
    index_t height, width, top, left;
};

namespace detail {

/// Calls f(token of the input, ky, kx) for the inputs that output t reads: inside the grid, and before present[batch], if that is given.
void for_each_tap(const grid& g, index_t t, const shape& weights, std::span<const index_t> present, index_t batch, const auto& f) {
    for (index_t ky = 0; ky < weights.tokens; ++ky)
        for (index_t kx = 0; kx < weights.channels; ++kx) {
            const auto y = t / g.width - g.top + ky, x = t % g.width - g.left + kx, token = y * g.width + x;
            if (y < 0 || y >= g.height || x < 0 || x >= g.width) continue;
            if (present.empty() || token < present[static_cast<std::size_t>(batch)]) f(token, ky, kx);
        }
}

} // namespace detail

/// out[b,h,(y,x),c] += bias[h,c] + sum over (ky, kx) of weights[h,c,ky,kx] in[b,g,(y - top + ky, x - left + kx),c]     g = h / (heads /
/// in's heads) over the inputs inside the grid that are before token present[b] (all, if that is empty). weights: (1 or heads, channels,
/// kernel_height, kernel_width); bias: none, one for each channel, or for each of every head. Row r of out is token first + r. Everything
/// in T.
template <class T, class U>
void add_depthwise_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const grid& g,
                               const tensor_view<const U>& weights, std::span<const U> bias, std::span<const index_t> present = {},
                               index_t first = 0) {
    const auto heads = out.shape().heads, channels = out.shape().channels;
    attn::detail::for_each_number(out.shape(), [&](index_t b, index_t h, index_t r, index_t c) {
        const auto own_bias = static_cast<std::size_t>(std::ssize(bias) > channels ? h * channels + c : c);
        T sum = bias.empty() ? T{0} : static_cast<T>(bias[own_bias]);
        detail::for_each_tap(g, first + r, weights.shape(), present, b, [&](index_t token, index_t ky, index_t kx) {
            sum += static_cast<T>(weights(weights.shape().batch == 1 ? 0 : h, c, ky, kx)) * in(b, h / (heads / in.shape().heads), token, c);
        });
        out(b, h, r, c) += sum;
    });
}

/// The gradients of add_depthwise_convolution from `d_out`, that of out (batch, heads, n, channels): every term weights[h,c,ky,kx]
/// in[b,g,(y - top + ky, x - left + kx),c] of out[b,h,(y,x),c] gives
///     weights[h,c,ky,kx] d_out[b,h,(y,x),c] to of_input[b,g,(y - top + ky, x - left + kx),c],
///     in[b,g,(y - top + ky, x - left + kx),c] d_out[b,h,(y,x),c] to of_weights[h,c,ky,kx]
/// and the bias gets d_out[b,h,(y,x),c]. Of their shapes; those without memory are left out. Everything in T.
template <class T, class U>
void depthwise_gradients(const tensor_view<const T>& in, const tensor_view<const T>& d_out, const grid& g,
                         const tensor_view<const U>& weights, const tensor_view<T>& of_input, const tensor_view<T>& of_weights,
                         std::span<T> of_bias, std::span<const index_t> present = {}) {
    attn::detail::fill_zero(of_input);
    attn::detail::fill_zero(of_weights);
    std::ranges::fill(of_bias, T{0});
    const auto heads = d_out.shape().heads, channels = d_out.shape().channels;
    attn::detail::for_each_number(d_out.shape(), [&](index_t b, index_t h, index_t t, index_t c) {
        const auto kernel = weights.shape().batch == 1 ? 0 : h, head = h / (heads / in.shape().heads);
        const T own = d_out(b, h, t, c);
        if (!of_bias.empty()) of_bias[static_cast<std::size_t>(std::ssize(of_bias) > channels ? h * channels + c : c)] += own;
        detail::for_each_tap(g, t, weights.shape(), present, b, [&](index_t token, index_t ky, index_t kx) {
            if (of_input.data()) of_input(b, head, token, c) += static_cast<T>(weights(kernel, c, ky, kx)) * own;
            if (of_weights.data()) of_weights(kernel, c, ky, kx) += in(b, head, token, c) * own;
        });
    });
}

} // namespace attn::reference
