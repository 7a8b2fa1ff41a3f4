// LayerNorm: every token row to mean 0 and variance 1.
#pragma once

#include "row_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// LayerNorm: each token is normalised by the mean and variance of its channels.
/// For each row x (channels) of a tensor (batch, heads, tokens, channels), over its channels:
///     out = (x - mean) / sqrt(variance + eps) * weight + bias,      variance = mean((x - mean)^2)
/// weight, bias: (channels) each, or empty (weight 1, bias 0). The operator refers to them; their owner keeps them.
/// A common offset of the channels costs no digits: x = 1e6 + small is normalised as small is. A constant row gives bias. A row that holds
/// NaN or infinity becomes NaN, and no other row does. Squares that would overflow or underflow are computed in double, scaled.
/// Time: one read and one write of the tensor. Memory: none, or some rows a thread where x and out are not stored alike. See `normalise`
/// for errors. Ba, Kiros and Hinton 2016, "Layer Normalization".
template <Scalar T>
struct layer_norm {
    using scalar = T;
    static constexpr std::string_view name = "layer_norm";
    static constexpr bool moves_statistics = false, adds_bias = true;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    double eps = 1e-5;

    void check(const shape& x) const {
        detail::check_parameter(name, "weight", weight, x);
        detail::check_parameter(name, "bias", bias, x);
        detail::check_eps(name, eps);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("weight", weight);
        out.require_apart("bias", bias);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0;
    }

    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        detail::normalise_tokens<detail::row_norm::centred, T>(x, out, weight, bias, eps, run);
    }

    using gradients = norm_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t) const {
        return detail::row_gradients<detail::row_norm::centred, T>::workspace_bytes(x);
    }
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const norm_gradients<T>& wanted,
                  const execution& run) const {
        detail::row_gradients<detail::row_norm::centred, T>(x, d_out, wanted, weight, eps)(run);
    }
};

/// Deduces a layer_norm of its weight's scalar type.
template <class W, class... Others>
layer_norm(const W&, const Others&...) -> layer_norm<detail::element_t<W>>;

} // namespace attn
