// Attention to what is kept of a sequence's tokens: their keys and values, or the state of a linear attention.
#pragma once

#include "../attention/ragged.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Several sequences, as each is kept, and which of the rows of a tensor (1, heads, all queries, d_k) are the queries of the last tokens of
/// each.
template <class Kept>
struct kept_batch {
    borrowed<const Kept* const> sequences;
    borrowed<const index_t> starts = {}; ///< sequence e has the queries starts[e] .. starts[e + 1] - 1; query e if not given

    /// How many sequences there are.
    index_t entries() const { return std::ssize(sequences); }
    /// Sequence number e.
    const Kept& operator[](index_t entry) const { return *sequences[static_cast<std::size_t>(entry)]; }
    /// The queries of a sequence.
    row_range queries(index_t entry) const {
        if (starts.empty()) return {entry, 1};
        const auto* const first = starts.data() + entry;
        return {first[0], first[1] - first[0]};
    }
};

namespace detail {

/// A call of attention with queries of the last tokens of what is kept, made of an operator, the queries, that, and the results.
/// - `check()`: throws attention_error unless all fits.
/// - `workspace_bytes(concurrency)`: of `run`.
/// - `run(execution)`: computes. All has been checked.
/// - `value_channels(kept)`: d_v.
/// - `work(kept, queries)`: how much work so many queries are, beside those of others.
template <class Op, class Kept>
class kept_call;

/// What keeps a sequence for a kept_call: its numbers are Kept::scalar.
template <class Kept>
inline constexpr bool keeps_sequence = false;

/// The calls of a batch.
template <class Op, class Kept>
struct kept_calls {
    using T = typename Kept::scalar;

    const Op& op;
    stored_view<const T> queries;
    const kept_batch<Kept>& batch;
    const outputs<T>& out;

    index_t entries() const { return batch.entries(); }
    index_t work(index_t entry) const { return kept_call<Op, Kept>::work(batch[entry], batch.queries(entry).count); }
    kept_call<Op, Kept> operator[](index_t entry) const {
        const tensor_part rows{.tokens = batch.queries(entry)};
        return {op, queries.slice(rows), batch[entry], out.slice(rows)};
    }
    /// Throws attention_error unless the queries are the rows of a tensor, the sequences are there, and each call fits.
    void check() const {
        check_view(Op::name, "q", queries);
        if (!batch.starts.empty()) check_starts(Op::name, "starts", batch.starts, "q", queries);
        const auto rows = batch.starts.empty() ? queries.shape().tokens : std::ssize(batch.starts) - 1;
        if (rows != entries()) detail::raise(shape_error(Op::name, "sequences", "are ", entries(), ", but there are queries of ", rows));
        for (const auto* of : batch.sequences)
            if (!of) detail::raise(argument_error(Op::name, "sequences", "hold a null pointer"));
        if (out.values.shape().tokens != queries.shape().tokens) refuse_result(Op::name, "out", out.values.shape(), queries.shape());
        for (index_t e = 0; e < entries(); ++e) (*this)[e].check();
    }
};

} // namespace detail

/// Attention of the queries of a sequence's last tokens, q (1, heads, n, d_k), to all that is kept of it, to out (1, heads, n, d_v), which
/// may be outputs, or a tensor or view of their values. `run` as in attend(op, in, out, run). Throws attention_error, before anything is
/// read or written, as that does, and if the sequence is shorter than q.
///
/// Of a sequence, by softmax, sparse or pointwise attention: out has the bits of attention to the tokens that are not evicted as one tensor
/// at their positions, keys and queries turned before if the pool has a rotary_reading, whose table must have the positions. What a page
/// costs is what the pattern shows of it.
///
/// Of a linear_state, by the operator that it was made for: out has the bits of attention to all tokens as one tensor, however they were
/// appended. Queries are of tokens of the last append. Time: one query reads S once, and at most 16 keys (of the first tokens, all).
template <Attention A, class Kept>
    requires detail::keeps_sequence<Kept>
void attend(const A& op, const detail::read_stored<typename Kept::scalar>& q, const Kept& of,
            const detail::written<typename Kept::scalar>& out, const detail::call_execution& run = {}) {
    const detail::kept_call<A, Kept> call(op, q, of, out);
    call.check();
    run.reserve(A::name, "q", q.shape(), call.workspace_bytes(run.concurrency()));
    call.run(run);
}

/// Attention to what is kept of a sequence, to a new tensor: see attend(op, q, of, out, run).
template <Attention A, class Kept>
    requires detail::keeps_sequence<Kept>
[[nodiscard]] tensor<typename Kept::scalar> attend(const A& op, const detail::read_stored<typename Kept::scalar>& q, const Kept& of,
                                                   const detail::call_execution& run = {}) {
    detail::check_view(A::name, "q", q);
    const auto& s = q.shape();
    tensor<typename Kept::scalar> out({s.batch, s.heads, s.tokens, detail::kept_call<A, Kept>::value_channels(of)});
    attend(op, q, of, outputs<typename Kept::scalar>{out}, run);
    return out;
}

/// Attention of the queries of several sequences, each to what is kept of its own: q (1, heads, all queries, d_k), out (1, heads, all
/// queries, d_v). The bits are those of a call for each. Sequences that are much of the work are computed by all threads, one after the
/// other, the others one on each. `run` as in attend(op, in, out, run). Throws attention_error, before anything is read or written, as a
/// call for each would.
template <Attention A, class Kept>
    requires detail::keeps_sequence<Kept>
void attend(const A& op, const detail::read_stored<typename Kept::scalar>& q, const kept_batch<Kept>& batch,
            const detail::written<typename Kept::scalar>& out, const detail::call_execution& run = {}) {
    const detail::kept_calls<A, Kept> calls{op, q, batch, out};
    calls.check();
    const detail::ragged_bytes bytes(calls, run.concurrency(),
                                     [&](index_t e, index_t threads) { return calls[e].workspace_bytes(threads); });
    run.reserve(A::name, "q", q.shape(), bytes.all);
    detail::for_each_entry(calls, bytes.of_a_thread, run, [&](index_t e, const execution& on) { calls[e].run(on); });
}

} // namespace attn
