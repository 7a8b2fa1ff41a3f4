// What q, k and v are checked for, and the memory that a call writes beside them.
#pragma once

#include "../core/output_memory.hpp"
#include "../pattern/pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Throws shape_error: "softmax_attention: k has shape (1, 2, 9, 63), but q has (1, 2, 9, 64): channels differ".
[[noreturn, gnu::cold]] inline void refuse(std::string_view operation, std::string_view argument, const shape& has, std::string_view other,
                                           const shape& other_has, std::string_view problem) {
    detail::raise(shape_error(operation, argument,
                              joined({"has shape ", to_string(has), ", but ", other, " has ", to_string(other_has), ": ", problem})));
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
    if (q.channels == 0)
        detail::raise(shape_error(operation, "q", joined({"has shape ", to_string(q), ": a score needs at least one channel"})));
    if (k.batch != q.batch) refuse(operation, "k", k, "q", q, "the batches differ");
    if (v.batch != q.batch) refuse(operation, "v", v, "q", q, "the batches differ");
    if (k.channels != q.channels) refuse(operation, "k", k, "q", q, "the channels differ");
    if (v.tokens != k.tokens) refuse(operation, "v", v, "k", k, "the tokens differ");
    const auto check_each = [&](std::string_view name, const per_batch& p, index_t rows) {
        if (!p.fits(q.batch))
            detail::raise(
                shape_error(operation, name, joined({"has ", std::to_string(p.count()), " entries, but q has shape ", to_string(q)})));
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
        detail::raise(shape_error(operation, "positions", "are of another batch than q of shape " + to_string(s.queries)));
    attn::check(pattern, pattern_context_of(operation, where, s, heads));
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

} // namespace attn
