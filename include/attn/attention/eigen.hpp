// Attention on Eigen matrices of one head: rows are tokens, columns are channels.
#pragma once

#include "../core/eigen.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Calls an operator on matrices q (n, d_k), k (m, d_k) and v (m, d_v) of any storage order, maps and blocks included. Returns a matrix
/// (n, d_v) in v's storage order. Throws like `attend` on views, which see them as (1, 1, rows, columns).
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V>
auto attend(const A& op, const Q& q, const K& k, const V& v, const positions& where = {}) {
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
