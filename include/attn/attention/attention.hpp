// What an attention operator is, and the front door through which all of them are called.
#pragma once

#include "../core/output_memory.hpp"
#include "../parallel/executor.hpp"
#include "../pattern/pattern.hpp"

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

/// Throws shape_error: "softmax_attention: k has shape (1, 2, 9, 63), but q has (1, 2, 9, 64): channels differ".
[[noreturn, gnu::cold]] inline void refuse(std::string_view operation, std::string_view argument, const shape& has, std::string_view other,
                                           const shape& other_has, std::string_view problem) {
    throw shape_error(operation, argument,
                      joined({"has shape ", to_string(has), ", but ", other, " has ", to_string(other_has), ": ", problem}));
}

/// Throws shape_error if the memory that a call writes overlaps its inputs.
template <Scalar T>
void check_apart_of_inputs(const inputs<T>& in, const output_memory& memory) {
    memory.require_apart("q", in.queries);
    memory.require_apart("k", in.keys);
    memory.require_apart("v", in.values);
    memory.require_apart("positions.first_query", in.positions.first_query);
    memory.require_apart("positions.first_key", in.positions.first_key);
}

/// Throws shape_error unless `out` has that shape and can be written while the inputs are read.
template <Scalar T>
void check_output(std::string_view operation, std::string_view argument, const auto& out, const shape& expected, const inputs<T>& in) {
    check_view(operation, argument, out);
    if (out.shape() != expected) refuse_result(operation, argument, out.shape(), expected);
    check_writable(operation, argument, out);
    check_apart_of_inputs(in, output_memory(operation, argument, out));
}

/// Throws shape_error unless q (batch, any, n, d_k), k (batch, any, m, d_k) and v (batch, any, m, d_v) fit each other but for their heads.
template <Scalar T>
void check_tensors(std::string_view operation, const inputs<T>& in) {
    const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
    check_view(operation, "q", in.queries);
    check_view(operation, "k", in.keys);
    check_view(operation, "v", in.values);
    if (q.channels == 0) throw shape_error(operation, "q", joined({"has shape ", to_string(q), ": a score needs at least one channel"}));
    if (k.batch != q.batch) refuse(operation, "k", k, "q", q, "the batches differ");
    if (v.batch != q.batch) refuse(operation, "v", v, "q", q, "the batches differ");
    if (k.channels != q.channels) refuse(operation, "k", k, "q", q, "the channels differ");
    if (v.tokens != k.tokens) refuse(operation, "v", v, "k", k, "the tokens differ");
    const auto check_each = [&](std::string_view name, const per_batch& p, index_t rows) {
        if (!p.fits(q.batch))
            throw shape_error(operation, name, joined({"has ", std::to_string(p.count()), " entries, but q has shape ", to_string(q)}));
        for (index_t b = 0; b < std::max<index_t>(1, p.count()); ++b) check_positions(operation, name, p[b], rows);
    };
    check_each("positions.first_query", in.positions.first_query, q.tokens);
    check_each("positions.first_key", in.positions.first_key, k.tokens);
}

/// Whether `kv_heads` heads can serve `heads` heads, each as many.
constexpr bool divides(index_t kv_heads, index_t heads) { return kv_heads == 0 ? heads == 0 : heads % kv_heads == 0; }

/// What patterns and score functions for so many heads are checked against.
inline pattern_context pattern_context_of(std::string_view operation, const positions& where, const input_shapes& s, index_t heads) {
    pattern_context context{.operation = operation, .batch = s.queries.batch, .heads = heads, .where = where};
    context.queries = s.queries.tokens;
    context.keys = s.keys.tokens;
    const bool shared = where.first_query.shared() && where.first_key.shared();
    for (index_t b = 0; b < (shared ? std::min<index_t>(s.queries.batch, 1) : s.queries.batch); ++b) {
        const auto i = where.first_query[b], j = where.first_key[b];
        context.first_query = b == 0 ? i : std::min(context.first_query, i);
        context.first_key = b == 0 ? j : std::min(context.first_key, j);
        context.end_query = b == 0 ? i + s.queries.tokens : std::max(context.end_query, i + s.queries.tokens);
        context.end_key = b == 0 ? j + s.keys.tokens : std::max(context.end_key, j + s.keys.tokens);
    }
    return context;
}

/// Throws attention_error unless a pattern can be asked about calls of such shapes at such positions, of which only the shapes are known.
void check_pattern(std::string_view operation, const Pattern auto& pattern, const input_shapes& s, const positions& where, index_t heads) {
    check_shape<float>(operation, "q", s.queries);
    check_shape<float>(operation, "k", s.keys);
    if (!where.first_query.fits(s.queries.batch) || !where.first_key.fits(s.queries.batch))
        throw shape_error(operation, "positions", "are of another batch than q of shape " + to_string(s.queries));
    attn::check(pattern, pattern_context_of(operation, where, s, heads));
}

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

/// Throws shape_error unless q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k) and v (batch, kv_heads, m, d_v) fit each other: the
/// batches equal, kv_heads a divisor of heads, d_k at least 1, and positions given for all batch entries or for none, none beyond
/// farthest_position.
template <Scalar T>
void check_inputs(std::string_view operation, const inputs<T>& in) {
    detail::check_tensors(operation, in);
    const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
    if (v.heads != k.heads) detail::refuse(operation, "v", v, "k", k, "the heads differ");
    if (!detail::divides(k.heads, q.heads)) detail::refuse(operation, "k", k, "q", q, "the heads of k and v must divide the heads of q");
}

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

/// Throws attention_error unless the outputs have the shapes of the results, and can be written while the inputs, and what the operator
/// refers to, are read.
template <Attention A, Scalar T>
void check_outputs(const A& op, const inputs<T>& in, const outputs<T>& out) {
    const auto shapes = shapes_of(in);
    check_output(A::name, "out", out.values, op.output_shape(shapes), in);
    op.check_apart(output_memory(A::name, "out", out.values));
    if (!out.log_sum_exp.data()) return;
    if constexpr (!A::traits.has_log_sum_exp)
        throw argument_error(A::name, "log_sum_exp", "is asked for, but without a softmax there is none");
    check_output(A::name, "log_sum_exp", out.log_sum_exp, log_sum_exp_shape(op, shapes), in);
    op.check_apart(output_memory(A::name, "log_sum_exp", out.log_sum_exp));
    if (overlap(out.log_sum_exp, out.values)) throw shape_error(A::name, "log_sum_exp", "overlaps out");
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

} // namespace attn
