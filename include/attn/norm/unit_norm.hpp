// Rows of Euclidean norm 1.
#pragma once

#include "row_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Unit norm: each token is divided by the Euclidean norm of its channels.
/// For each row x (channels) of a tensor (batch, heads, tokens, channels), over its channels:
///     out = x / max(|x|, eps),      |x| = sqrt(sum(x^2))
/// As the query_norm and key_norm of a multi_head it makes scores cosines (Liu et al. 2022, "Swin Transformer V2: Scaling Up Capacity and
/// Resolution"); delta rules take keys so (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length").
/// A row of zeros stays. A row that holds NaN becomes NaN; beside an infinity, which becomes NaN, the finite numbers become 0; no other row
/// is touched. Squares that would overflow or underflow are computed in double, scaled. The gradient takes a row shorter than eps for x /
/// eps. Time: one read and one write of the tensor. Memory: none, or some rows a thread where x and out are not stored alike. See
/// `normalise` for errors; an eps whose inverse is no finite number is refused.
template <Scalar T>
struct unit_norm {
    using scalar = T;
    static constexpr std::string_view name = "unit_norm";
    static constexpr bool moves_statistics = false, adds_bias = false;

    double eps = 1e-12;

    void check(const shape&) const {
        detail::check_eps(name, eps);
        detail::check_number<T>(name, "1 / eps", 1 / eps);
    }
    void check_apart(const output_memory&) const {}
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0;
    }

    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        detail::normalise_tokens<detail::row_norm::unit, T>(x, out, {}, {}, eps, run);
    }

    using gradients = token_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t) const {
        return detail::row_gradients<detail::row_norm::unit, T>::workspace_bytes(x);
    }
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const token_gradients<T>& wanted,
                  const execution& run) const {
        detail::row_gradients<detail::row_norm::unit, T>(x, d_out, {.x = wanted.x}, {}, eps)(run);
    }
};

} // namespace attn
