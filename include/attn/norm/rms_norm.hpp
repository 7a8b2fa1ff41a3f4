// RMSNorm: every token row to a root mean square of 1.
#pragma once

#include "row_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// RMSNorm: each token is divided by the root of the mean square of its channels.
/// For each row x (channels) of a tensor (batch, heads, tokens, channels), over its channels:
///     out = x / sqrt(mean(x^2) + eps) * weight
/// weight: (channels), or empty (1). The operator refers to it; its owner keeps it.
/// A row that holds NaN becomes NaN; beside an infinity, which becomes NaN, the finite numbers become 0; no other row is touched. Squares
/// that would overflow or underflow are computed in double, scaled.
/// Time: one read and one write of the tensor. Memory: none, or some rows a thread where x and out are not stored alike. See `normalise`
/// for errors. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
template <Scalar T>
struct rms_norm {
    using scalar = T;
    static constexpr std::string_view name = "rms_norm";
    static constexpr bool moves_statistics = false, adds_bias = false;

    borrowed<const T> weight = {};
    double eps = 1e-5;

    void check(const shape& x) const {
        detail::check_parameter(name, "weight", weight, x);
        detail::check_eps(name, eps);
    }
    void check_apart(const output_memory& out) const { out.require_apart("weight", weight); }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0;
    }

    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        detail::normalise_tokens<detail::row_norm::root_mean_square, T>(x, out, weight, {}, eps, run);
    }

    using gradients = norm_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t) const {
        return detail::row_gradients<detail::row_norm::root_mean_square, T>::workspace_bytes(x);
    }
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const norm_gradients<T>& wanted,
                  const execution& run) const {
        detail::row_gradients<detail::row_norm::root_mean_square, T>(x, d_out, wanted, weight, eps)(run);
    }
};

/// Deduces an rms_norm of its weight's scalar type.
template <class W, class... Others>
rms_norm(const W&, const Others&...) -> rms_norm<detail::element_t<W>>;

} // namespace attn
