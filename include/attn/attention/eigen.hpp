// Attention on Eigen matrices of one head, and its gradient: rows are tokens, columns are channels.
#pragma once

#include "../core/eigen.hpp"
#include "backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Something of Eigen's: a matrix, or an expression.
template <class M>
concept EigenObject = std::derived_from<M, Eigen::EigenBase<M>>;
/// Something of Eigen's that has no memory of its own, or holds numbers that no operator reads.
template <class M>
concept EigenExpression = EigenObject<M> && !EigenMatrix<M>;

/// What the numbers of a matrix are computed in; of those that no operator reads, float.
template <class M>
struct matrix_number {
    using type = float;
};
template <EigenObject M>
    requires Storage<typename M::Scalar>
struct matrix_number<M> {
    using type = computed_in<typename M::Scalar>;
};
template <class M>
using matrix_number_t = typename matrix_number<M>::type;

/// Whether a call can read such q, k and v. Where it cannot, the program does not compile, and one sentence tells why.
template <class Q, class K, class V>
constexpr bool check_matrices() {
    constexpr bool readable = EigenMatrix<Q> && EigenMatrix<K> && EigenMatrix<V>;
    static_assert(readable,
                  "attn: q, k and v are matrices of float, double or 16-bit numbers; evaluate an expression first: (2 * x).eval()");
    using T = matrix_number_t<Q>;
    constexpr bool alike = !readable || (std::same_as<T, matrix_number_t<K>> && std::same_as<T, matrix_number_t<V>>);
    static_assert(alike, "attn: q, k and v must be of double, or each of float or 16-bit numbers");
    return readable && alike;
}

} // namespace detail

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
    using T = detail::matrix_number_t<Q>;
    Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, V::IsRowMajor ? Eigen::RowMajor : Eigen::ColMajor> out;
    if constexpr (detail::check_matrices<Q, K, V>()) {
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

/// Calls an operator on matrices, and writes to views of matrices what its gradient reads again:
///     attend(op, q, k, v, outputs<float>{view(out), view(log_sum_exp)});
/// log_sum_exp is a column of n numbers. Otherwise as above.
template <Attention A, EigenMatrix Q, EigenMatrix K, EigenMatrix V>
void attend(const A& op, const Q& q, const K& k, const V& v, const outputs<detail::matrix_number_t<Q>>& out,
            const detail::call_execution& run = {}, const positions& where = {}) {
    if constexpr (detail::check_matrices<Q, K, V>())
        attend(op, inputs<detail::matrix_number_t<Q>>{view(q), view(k), view(v), where}, out, run);
}

/// The gradient of a call on matrices q (n, d_k), k (m, d_k) and v (m, d_v) of any storage order, maps and blocks included, with respect to
/// what it read, from what it wrote and the gradient of the loss by that, all views of matrices:
///     backward(op, q, k, v, {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dq), view(dk), view(dv)}});
/// An operator without a softmax saves {view(out)}, and one whose inputs alone have gradients wants {view(dq), view(dk), view(dv)}. What
/// `wanted` has no view of is not computed. `run` and `where` are those of `attend`. Throws like `backward` on views, which see matrices as
/// (1, 1, rows, columns).
template <DifferentiableAttention A, detail::EigenObject Q, detail::EigenObject K, detail::EigenObject V>
void backward(const A& op, const Q& q, const K& k, const V& v, const saved_outputs<detail::matrix_number_t<Q>>& saved,
              const output_gradients<detail::matrix_number_t<Q>>& d_out, const gradients_of<A, detail::matrix_number_t<Q>>& wanted,
              const detail::call_execution& run = {}, const positions& where = {}) {
    if constexpr (detail::check_matrices<Q, K, V>())
        backward(op, inputs<detail::matrix_number_t<Q>>{view(q), view(k), view(v), where}, saved, d_out, wanted, run);
}

/// No call: expressions are refused in one sentence when the program is compiled, and so are matrices of other numbers.
template <Attention A, class Q, class K, class V, class... Others>
    requires(detail::EigenExpression<Q> || detail::EigenExpression<K> || detail::EigenExpression<V>)
Eigen::MatrixXf attend(const A&, const Q&, const K&, const V&, const Others&...) {
    static_cast<void>(detail::check_matrices<Q, K, V>());
    return {};
}

} // namespace attn
