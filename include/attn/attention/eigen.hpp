// Attention on Eigen matrices of one head: rows are tokens, columns are channels.
#pragma once

#include "../core/eigen.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Calls an operator on matrices q (n, d_k), k (m, d_k) and v (m, d_v) of any storage order, maps and blocks included, and writes the matrix
/// out (n, d_v). Throws like `attend` on views, which see them as (1, 1, rows, columns).
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V, EigenMatrix O, ExecutorArgument E = sequential>
void attend(const A& op, const Q& q, const K& k, const V& v, O&& out, E&& executor = {}, const positions& where = {}) {
    using T = typename Q::Scalar;
    static_assert(std::same_as<T, typename K::Scalar> && std::same_as<T, typename V::Scalar> && std::same_as<T, typename std::remove_cvref_t<O>::Scalar>,
                  "attn: q, k, v and out must have the same scalar type");
    attend(op, inputs<T>{view(q), view(k), view(v), where}, outputs<T>{view(out)}, executor);
}

/// The same on the calling thread, to a new matrix in v's storage order.
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V>
[[nodiscard]] auto attend(const A& op, const Q& q, const K& k, const V& v, const positions& where = {}) {
    using T = typename Q::Scalar;
    static_assert(std::same_as<T, typename K::Scalar> && std::same_as<T, typename V::Scalar>, "attn: q, k and v must have the same scalar type");
    const inputs<T> in{view(q), view(k), view(v), where};
    op.check(in);
    const auto result = op.output_shape(shapes_of(in));
    Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, V::IsRowMajor ? Eigen::RowMajor : Eigen::ColMajor> out(result.tokens, result.channels);
    sequential here;
    workspace memory(workspace_bytes<T>(op, shapes_of(in), here));
    attend(op, in, outputs<T>{view(out)}, execution(here, memory));
    return out;
}

} // namespace attn
