// What an attention operator is, and the front door through which all of them are called.
#pragma once

#include "../parallel/executor.hpp"
#include "input_checks.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What an operator has beside what all have, and what it is. A name that is none of these does not compile.
struct attention_traits {
    bool has_log_sum_exp = true;        ///< a softmax
    bool has_log_sum_exp_shape = false; ///< log_sum_exp_shape(shapes): of its log_sum_exp, whose heads are not those of the result
    bool has_narrow_workspace = false;  ///< narrow_workspace_bytes<T>(shapes, concurrency): what a result that is stored in 16 bits needs
    bool has_least_workspace = false;   ///< least_workspace_bytes<T>(shapes, concurrency): what forward can do with, in more time
    bool knows_storage = false;         ///< forward<unnarrowed_storage>(in, out, run): of tensors none of which is stored in 16 bits
    bool keys_are_queries = false;      ///< so that a layer makes no others
    bool writes_beside_values = false;  ///< forward writes more than the result, and is called for an empty one too
};

/// The products of an operator as its numbers are: their operands are not rounded.
struct unrounded_products {
    template <Scalar T>
    using operand = T;
};

/// How an operator multiplies: unrounded_products, or bf16_products (products.hpp).
template <class R>
concept Products = requires { typename R::template operand<float>; };

/// A const value that computes out[b, h, i] = sum over j of A[b, h, i, j] v[b, h, j] from queries, keys and values.
/// - `name`: what errors call it.
/// - `traits`: which of the optional members it has: see attention_traits. It has those that it names, and no others.
/// - `check(in)`: throws attention_error if shapes, positions or parameters do not fit. Reads no element of queries, keys and values.
/// - `check_apart(out)`: throws, by out.require_apart, if an output overlaps what the operator refers to; nothing if it refers to nothing.
/// - `output_shape(shapes)`: of the values it writes.
/// - `workspace_bytes<T>(shapes, concurrency)`: the scratch memory that `forward` needs.
/// - `forward(in, out, run)`: computes. Everything has been checked; it allocates nothing and writes only to `out`.
template <class A>
concept Attention = requires(const A& op, const inputs<float>& in, const outputs<float>& out, const output_memory& memory,
                             const input_shapes& shapes, const execution& run) {
    { A::name } -> std::convertible_to<std::string_view>;
    { A::traits } -> std::same_as<const attention_traits&>;
    op.check(in);
    op.check_apart(memory);
    { op.output_shape(shapes) } -> std::same_as<shape>;
    { op.template workspace_bytes<float>(shapes, index_t{1}) } -> std::same_as<std::size_t>;
    op.forward(in, out, run);
    requires A::traits.has_log_sum_exp_shape == requires {
        { op.log_sum_exp_shape(shapes) } -> std::same_as<shape>;
    };
    requires A::traits.has_narrow_workspace == requires {
        { op.template narrow_workspace_bytes<float>(shapes, index_t{1}) } -> std::same_as<std::size_t>;
    };
    requires A::traits.knows_storage == requires { op.template forward<unnarrowed_storage>(in, out, run); };
    requires A::traits.has_least_workspace == requires {
        { op.template least_workspace_bytes<float>(shapes, index_t{1}) } -> std::same_as<std::size_t>;
    };
};

namespace detail {

/// Workspace for a result that is stored in S.
template <Storage S, Attention A>
std::size_t workspace_bytes_for(const A& op, const input_shapes& shapes, index_t concurrency) {
    using T = computed_in<S>;
    const auto bytes = op.template workspace_bytes<T>(shapes, concurrency);
    if constexpr (Narrow<S> && A::traits.has_narrow_workspace)
        return std::max(bytes, op.template narrow_workspace_bytes<T>(shapes, concurrency));
    else return bytes;
}
/// What such a call can do with.
template <Storage S, Attention A>
std::size_t least_workspace_bytes_for(const A& op, const input_shapes& shapes, index_t concurrency) {
    if constexpr (A::traits.has_least_workspace) return op.template least_workspace_bytes<computed_in<S>>(shapes, concurrency);
    else return workspace_bytes_for<S>(op, shapes, concurrency);
}
/// Throws shape_error unless tensors can have such shapes.
template <Storage S>
void check_shapes(std::string_view operation, const input_shapes& shapes) {
    check_shape<S>(operation, "q", shapes.queries);
    check_shape<S>(operation, "k", shapes.keys);
    check_shape<S>(operation, "v", shapes.values);
}

} // namespace detail

/// The shape (batch, heads, n, 1) of the operator's log_sum_exp, or of the rows of one that has none.
template <Attention A>
shape log_sum_exp_shape(const A& op, const input_shapes& shapes) {
    auto rows = op.output_shape(shapes);
    rows.channels = 1;
    if constexpr (A::traits.has_log_sum_exp_shape) rows = op.log_sum_exp_shape(shapes);
    return rows;
}

/// Bytes of workspace that a call of `op` on such shapes needs with such an executor or execution, if its result is stored in T. Throws
/// attention_error if it cannot tell: no tensors have such shapes, or the operator lacks what its size depends on.
template <Storage T, Attention A>
std::size_t workspace_bytes(const A& op, const input_shapes& shapes, const detail::call_execution& run = {}) {
    detail::check_shapes<T>(A::name, shapes);
    return detail::workspace_bytes_for<T>(op, shapes, run.concurrency());
}

/// Bytes of workspace that such a call can do with, perhaps in more time: those above, unless the operator says otherwise. Throws like it.
template <Storage T, Attention A>
std::size_t least_workspace_bytes(const A& op, const input_shapes& shapes, const detail::call_execution& run = {}) {
    detail::check_shapes<T>(A::name, shapes);
    return detail::least_workspace_bytes_for<T>(op, shapes, run.concurrency());
}

namespace detail {

/// Throws argument_error about the log_sum_exp of an operator that has none.
[[noreturn, gnu::cold]] inline void refuse_log_sum_exp(std::string_view operation) {
    detail::raise(argument_error(operation, "log_sum_exp", "is asked for, but without a softmax there is none"));
}
/// Throws attention_error unless the outputs have the shapes of the results, and can be written while the inputs, and what the operator
/// refers to, are read.
template <Attention A, Scalar T>
void check_outputs(const A& op, const inputs<T>& in, const outputs<T>& out) {
    const auto shapes = shapes_of(in);
    check_output(A::name, "out", out.values, op.output_shape(shapes), in);
    op.check_apart(output_memory(A::name, "out", out.values));
    if (!out.log_sum_exp.data()) return;
    if constexpr (!A::traits.has_log_sum_exp) refuse_log_sum_exp(A::name);
    check_output(A::name, "log_sum_exp", out.log_sum_exp, log_sum_exp_shape(op, shapes), in);
    op.check_apart(output_memory(A::name, "log_sum_exp", out.log_sum_exp));
    if (overlap(out.log_sum_exp, out.values)) detail::raise(shape_error(A::name, "log_sum_exp", "overlaps out"));
}

/// Computes, if there is anything to write. Everything has been checked.
template <class Stored = any_storage, Attention A, Scalar T>
void forward_checked(const A& op, const inputs<T>& in, const outputs<T>& out, const execution& run) {
    const bool any_rows = out.log_sum_exp.data() && out.log_sum_exp.shape().size() > 0;
    if (!A::traits.writes_beside_values && !any_rows && out.values.shape().size() == 0) return;
    if constexpr (A::traits.knows_storage) op.template forward<Stored>(in, out, run);
    else op.forward(in, out, run);
}

/// The call of an operator on tensors that may be stored so, whose inputs it has checked.
template <class Stored, Attention A, Scalar T>
void attend_checked(const A& op, const inputs<T>& in, const outputs<T>& out, const call_execution& run) {
    check_outputs(op, in, out);
    const auto shapes = shapes_of(in);
    const auto reserve = [&]<Storage S>(std::type_identity<S>) {
        run.reserve(A::name, "q", shapes.queries,
                    run.grows() ? workspace_bytes_for<S>(op, shapes, run.concurrency())
                                : least_workspace_bytes_for<S>(op, shapes, run.concurrency()));
    };
    if constexpr (std::same_as<Stored, any_storage>) with_storage(out.values, reserve);
    else reserve(std::type_identity<T>{});
    forward_checked<Stored>(op, in, out, run);
}

template <class Stored, Attention A, Scalar T>
void attend(const A& op, const inputs<T>& in, const outputs<T>& out, const call_execution& run) {
    op.check(in);
    attend_checked<Stored>(op, in, out, run);
}
/// The call of an operator to a new tensor.
template <class Stored, Attention A, Scalar T>
tensor<T> attend(const A& op, const inputs<T>& in, const call_execution& run) {
    op.check(in);
    tensor<T> out(op.output_shape(shapes_of(in)));
    attend_checked<Stored>(op, in, outputs<T>{out}, run);
    return out;
}

} // namespace detail

/// Calls an operator: checks everything once, then computes into `out`. `run` is an execution, whose workspace is used, or an executor,
/// for which a workspace is made for the call; the calling thread if none is given. Allocates nothing but a workspace that has to grow.
/// Throws attention_error, before anything is read or written, naming operator, argument and shapes: shapes that do not fit, an output
/// that overlaps an input or what the operator refers to, parameters that do not suit the positions, a given workspace too small. What a
/// caller's function throws passes through.
template <Attention A, Scalar T>
void attend(const A& op, const inputs<T>& in, const outputs<T>& out, const detail::call_execution& run = {}) {
    detail::attend<any_storage>(op, in, out, run);
}

/// Attention to a new tensor (batch, heads, n, d_v): see attend(op, in, out, run).
template <Attention A, Scalar T>
[[nodiscard]] tensor<T> attend(const A& op, const inputs<T>& in, const detail::call_execution& run = {}) {
    return detail::attend<any_storage>(op, in, run);
}

/// Attention of tensors or views q, k and v to out: of double, or each of float or 16-bit numbers. See attend(op, in, out, run).
template <Attention A, StoredTensor Q, StoredTensor K, StoredTensor V, StoredTensor O>
void attend(const A& op, const Q& q, const K& k, const V& v, O&& out, const detail::call_execution& run = {}, const positions& where = {}) {
    using T = detail::computed_t<Q>;
    constexpr bool alike = detail::computed_alike<Q, K, V, std::remove_cvref_t<O>>;
    static_assert(alike, "attn: q, k, v and out must be of double, or each of float or 16-bit numbers");
    if constexpr (alike)
        detail::attend<detail::storage_of<T, Q, K, V, std::remove_cvref_t<O>>>(op, inputs<T>{q, k, v, where}, outputs<T>{out}, run);
}

/// Attention of tensors or views q, k and v to a new tensor of float or double: see attend(op, in, out, run).
template <Attention A, StoredTensor Q, StoredTensor K, StoredTensor V>
[[nodiscard]] auto attend(const A& op, const Q& q, const K& k, const V& v, const detail::call_execution& run = {},
                          const positions& where = {}) {
    using T = detail::computed_t<Q>;
    constexpr bool alike = detail::computed_alike<Q, K, V>;
    static_assert(alike, "attn: q, k and v must be of double, or each of float or 16-bit numbers");
    if constexpr (alike) return detail::attend<detail::storage_of<T, Q, K, V>>(op, inputs<T>{q, k, v, where}, run);
    else return tensor<T>();
}

/// Attention of tensors or views q, k and v on the calling thread, to a new tensor of float or double: see attend(op, in, out, run).
template <Attention A, StoredTensor Q, StoredTensor K, StoredTensor V>
[[nodiscard]] auto attend(const A& op, const Q& q, const K& k, const V& v, const positions& where) {
    return attend(op, q, k, v, detail::call_execution(), where);
}

namespace detail {

/// A tensor, or a view of one, of numbers that no operator reads.
template <class V>
concept OtherTensor = !StoredTensor<V> && requires(const V& tensor) {
    tensor.data();
    { tensor.shape() } -> std::same_as<const shape&>;
};

} // namespace detail

/// No call: tensors of other numbers, such as whole ones, are refused in one sentence when the program is compiled.
template <Attention A, class Q, class K, class V, class... Others>
    requires(detail::OtherTensor<Q> || detail::OtherTensor<K> || detail::OtherTensor<V>)
tensor<float> attend(const A&, const Q&, const K&, const V&, const Others&...) {
    constexpr bool readable = StoredTensor<Q> && StoredTensor<K> && StoredTensor<V>;
    static_assert(readable, "attn: q, k and v are tensors of float, double or 16-bit numbers");
    return {};
}
/// No call: a number where an executor is to be is refused in one sentence when the program is compiled.
template <Attention A, class... Arguments>
    requires(std::integral<Arguments> || ...)
tensor<float> attend(const A&, const Arguments&...) {
    static_assert(sizeof...(Arguments) == 0,
                  "attn: what runs a call is an executor, such as attn::thread_pool(2), or an execution, no number");
    return {};
}

} // namespace attn
