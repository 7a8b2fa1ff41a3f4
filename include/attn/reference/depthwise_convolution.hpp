// The definition of the depthwise convolution: a direct sum.
#pragma once

#include "../core/tensor_view.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// A grid of tokens, row-major, and where its kernel begins: output (y, x) reads inputs (y - top + ky, x - left + kx).
struct grid {
    index_t height, width, top, left;
};

/// out[b,h,(y,x),c] += bias[h,c] + sum over (ky, kx) of weights[h,c,ky,kx] in[b,g,(y - top + ky, x - left + kx),c]     g = h / (heads /
/// in's heads) over the inputs inside the grid that are before token present[b] (all, if that is empty). weights: (1 or heads, channels,
/// kernel_height, kernel_width); bias: none, one for each channel, or for each of every head. Row r of out is token first + r. Everything
/// in T.
template <class T, class U>
void add_depthwise_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const grid& g,
                               const tensor_view<const U>& weights, std::span<const U> bias, std::span<const index_t> present = {},
                               index_t first = 0) {
    const auto [batch, heads, rows, channels] = out.shape();
    const auto [kernels, kernel_channels, kernel_height, kernel_width] = weights.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t r = 0; r < rows; ++r)
                for (index_t c = 0; c < channels; ++c) {
                    const auto t = first + r;
                    const auto own_bias = static_cast<std::size_t>(std::ssize(bias) > channels ? h * channels + c : c);
                    T sum = bias.empty() ? T{0} : static_cast<T>(bias[own_bias]);
                    for (index_t ky = 0; ky < kernel_height; ++ky)
                        for (index_t kx = 0; kx < kernel_width; ++kx) {
                            const auto y = t / g.width - g.top + ky, x = t % g.width - g.left + kx;
                            if (y < 0 || y >= g.height || x < 0 || x >= g.width) continue;
                            if (!present.empty() && y * g.width + x >= present[static_cast<std::size_t>(b)]) continue;
                            sum += static_cast<T>(weights(kernels == 1 ? 0 : h, c, ky, kx)) *
                                   in(b, h / (heads / in.shape().heads), y * g.width + x, c);
                        }
                    out(b, h, r, c) += sum;
                }
}

} // namespace attn::reference
