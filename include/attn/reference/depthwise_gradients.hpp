// The definition of the depthwise convolution's gradient: direct sums.
#pragma once

#include "depthwise_convolution.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// The gradients of add_depthwise_convolution from `d_out`, that of out (batch, heads, n, channels): every term weights[h,c,ky,kx]
/// in[b,g,(y - top + ky, x - left + kx),c] of out[b,h,(y,x),c] gives
///     weights[h,c,ky,kx] d_out[b,h,(y,x),c] to of_input[b,g,(y - top + ky, x - left + kx),c],
///     in[b,g,(y - top + ky, x - left + kx),c] d_out[b,h,(y,x),c] to of_weights[h,c,ky,kx]
/// and the bias gets d_out[b,h,(y,x),c]. Of their shapes; those without memory are left out. Everything in T.
template <class T, class U>
void depthwise_gradients(const tensor_view<const T>& in, const tensor_view<const T>& d_out, const grid& g,
                         const tensor_view<const U>& weights, const tensor_view<T>& of_input, const tensor_view<T>& of_weights,
                         std::span<T> of_bias, std::span<const index_t> present = {}) {
    const auto zero = [](const tensor_view<T>& t) {
        const auto& s = t.shape();
        for (index_t b = 0; t.data() && b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) t(b, h, i, c) = T{0};
    };
    zero(of_input);
    zero(of_weights);
    for (auto& sum : of_bias) sum = T{0};
    const auto [batch, heads, tokens, channels] = d_out.shape();
    const auto [kernels, kernel_channels, kernel_height, kernel_width] = weights.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t t = 0; t < tokens; ++t)
                for (index_t c = 0; c < channels; ++c) {
                    const auto kernel = kernels == 1 ? 0 : h, head = h / (heads / in.shape().heads);
                    const T own = d_out(b, h, t, c);
                    if (!of_bias.empty()) of_bias[static_cast<std::size_t>(std::ssize(of_bias) > channels ? h * channels + c : c)] += own;
                    for (index_t ky = 0; ky < kernel_height; ++ky)
                        for (index_t kx = 0; kx < kernel_width; ++kx) {
                            const auto y = t / g.width - g.top + ky, x = t % g.width - g.left + kx, token = y * g.width + x;
                            if (y < 0 || y >= g.height || x < 0 || x >= g.width) continue;
                            if (!present.empty() && token >= present[static_cast<std::size_t>(b)]) continue;
                            if (of_input.data()) of_input(b, head, token, c) += static_cast<T>(weights(kernel, c, ky, kx)) * own;
                            if (of_weights.data()) of_weights(kernel, c, ky, kx) += in(b, head, token, c) * own;
                        }
                }
}

} // namespace attn::reference
