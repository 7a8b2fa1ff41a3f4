// Attention on Eigen matrices of one head: rows are tokens, columns are channels.
#pragma once

#include "../core/eigen.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Calls an operator on matrices q (n, d_k), k (m, d_k) and v (m, d_v) of any storage order, maps and blocks included, and writes the
/// matrix out (n, d_v); each may be of 16-bit numbers, unless they are of double. Throws like `attend` on views, which see them as (1, 1,
/// rows, columns).
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V, EigenMatrix O>
void attend(const A& op, const Q& q, const K& k, const V& v, O&& out, const detail::call_execution& run = {}, const positions& where = {}) {
    attend(op, view(q), view(k), view(v), view(out), run, where);
}

/// Calls an operator on matrices, to a new matrix of float or double in v's storage order.
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V>
[[nodiscard]] auto attend(const A& op, const Q& q, const K& k, const V& v, const detail::call_execution& run = {},
                          const positions& where = {}) {
    using T = computed_in<typename Q::Scalar>;
    constexpr bool alike = std::same_as<T, computed_in<typename K::Scalar>> && std::same_as<T, computed_in<typename V::Scalar>>;
    static_assert(alike, "attn: q, k and v must be of double, or each of float or 16-bit numbers");
    Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, V::IsRowMajor ? Eigen::RowMajor : Eigen::ColMajor> out;
    if constexpr (alike) {
        const inputs<T> in{view(q), view(k), view(v), where};
        op.check(in);
        const auto result = op.output_shape(shapes_of(in));
        out.resize(static_cast<Eigen::Index>(result.tokens), static_cast<Eigen::Index>(result.channels));
        attend(op, q, k, v, out, run, where);
    }
    return out;
}

/// Calls an operator on matrices on the calling thread, to a new matrix of float or double in v's storage order.
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V>
[[nodiscard]] auto attend(const A& op, const Q& q, const K& k, const V& v, const positions& where) {
    return attend(op, q, k, v, detail::call_execution(), where);
}

namespace detail {

/// Something of Eigen's that has no memory of its own, or holds numbers that no operator reads.
template <class M>
concept EigenExpression = std::derived_from<M, Eigen::EigenBase<M>> && !EigenMatrix<M>;

} // namespace detail

/// No call: expressions are refused in one sentence when the program is compiled, and so are matrices of other numbers.
template <Attention A, class Q, class K, class V, class... Others>
    requires(detail::EigenExpression<Q> || detail::EigenExpression<K> || detail::EigenExpression<V>)
Eigen::MatrixXf attend(const A&, const Q&, const K&, const V&, const Others&...) {
    constexpr bool readable = EigenMatrix<Q> && EigenMatrix<K> && EigenMatrix<V>;
    static_assert(readable,
                  "attn: q, k and v are matrices of float, double or 16-bit numbers; evaluate an expression first: (2 * x).eval()");
    return {};
}

} // namespace attn
