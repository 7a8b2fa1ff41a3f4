// The definition of the causal convolution and its gradient: direct sums.
#pragma once

#include "../core/tensor_view.hpp"
#include "../score/dual.hpp"

#include <algorithm>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// Token i of x; before token 0 the state, or 0 if there is none.
template <class T>
T token_or_state(const tensor_view<const T>& x, const tensor_view<const T>& state, index_t b, index_t h, index_t i, index_t c) {
    return i >= 0 ? x(b, h, i, c) : state.data() ? state(b, h, state.shape().tokens + i, c) : T{0};
}
/// bias + sum over t of weights[t] x[i - taps + 1 + t], of one channel.
template <class T, class U>
T causal_sum(const tensor_view<const T>& x, const tensor_view<const T>& state, const tensor_view<const U>& weights, std::span<const U> bias,
             index_t b, index_t h, index_t i, index_t c) {
    const auto own = h * x.shape().channels + c, taps = weights.shape().channels;
    T sum = bias.empty() ? T{0} : static_cast<T>(bias[static_cast<std::size_t>(own)]);
    for (index_t t = 0; t < taps; ++t) sum += static_cast<T>(weights(0, own, 0, t)) * token_or_state(x, state, b, h, i - taps + 1 + t, c);
    return sum;
}

} // namespace detail

/// out[i,c] = activation(bias[c] + sum over t < taps of weights[c,t] x[i - taps + 1 + t,c]), x before token 0 being the state, or 0; and
/// last_state, if it has memory: x[n - taps + 1 ... n - 1]. x (batch, heads, n, channels), states (batch, heads, taps - 1, channels),
/// weights (1, heads channels, 1, taps), bias (heads channels) or none. Everything in T.
template <class T, class U>
void causal_convolution(const tensor_view<const T>& x, const tensor_view<const T>& first_state, const tensor_view<const U>& weights,
                        std::span<const U> bias, const auto& activation, const tensor_view<T>& out, const tensor_view<T>& last_state = {}) {
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        out(b, h, i, c) = activation(detail::causal_sum(x, first_state, weights, bias, b, h, i, c));
    });
    const auto& s = last_state.shape();
    if (last_state.data())
        attn::detail::for_each_number(s, [&](index_t b, index_t h, index_t r, index_t c) {
            last_state(b, h, r, c) = detail::token_or_state(x, first_state, b, h, x.shape().tokens - s.tokens + r, c);
        });
}

/// The gradients of causal_convolution from that of out, `d_out`, and that of last_state, or 0 if that has no memory. With
/// g[i] = d_out[i] activation'(z[i]), every term weights[c,t] x[i - taps + 1 + t,c] of z[i,c] gives
///     weights[c,t] g[i,c] to x or the first state at i - taps + 1 + t,      x[i - taps + 1 + t,c] g[i,c] to weights[c,t]
/// the bias gets g[i,c], and what is in the last state its gradient. In the shapes of what they are of. Everything in T.
template <class T, class U>
void causal_convolution_backward(const tensor_view<const T>& x, const tensor_view<const T>& first_state,
                                 const tensor_view<const U>& weights, std::span<const U> bias, const auto& activation,
                                 const tensor_view<const T>& d_out, const tensor_view<const T>& d_last_state, const tensor_view<T>& d_x,
                                 const tensor_view<T>& d_first_state, const tensor_view<T>& d_weights, std::span<T> d_bias) {
    for (const auto& wanted : {d_x, d_first_state, d_weights}) attn::detail::fill_zero(wanted);
    std::ranges::fill(d_bias, T{0});
    const auto tokens = x.shape().tokens, channels = x.shape().channels, taps = weights.shape().channels;
    const auto gradient_at = [&](index_t b, index_t h, index_t i, index_t c) -> T& {
        return i >= 0 ? d_x(b, h, i, c) : d_first_state(b, h, taps - 1 + i, c);
    };
    if (d_last_state.data())
        attn::detail::for_each_number(d_last_state.shape(), [&](index_t b, index_t h, index_t r, index_t c) {
            gradient_at(b, h, tokens - taps + 1 + r, c) += d_last_state(b, h, r, c);
        });
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        const auto z = detail::causal_sum(x, first_state, weights, bias, b, h, i, c);
        const T g = d_out(b, h, i, c) * attn::detail::differentiated(activation, z).derivative;
        const auto own = h * channels + c;
        if (!d_bias.empty()) d_bias[static_cast<std::size_t>(own)] += g;
        for (index_t t = 0; t < taps; ++t) {
            const auto from = i - taps + 1 + t;
            gradient_at(b, h, from, c) += static_cast<T>(weights(0, own, 0, t)) * g;
            d_weights(0, own, 0, t) += detail::token_or_state(x, first_state, b, h, from, c) * g;
        }
    });
}

} // namespace attn::reference
