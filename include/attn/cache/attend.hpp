// Attention to what a cache holds.
#pragma once

#include "../attention/ragged.hpp"
#include "../attention/resumable.hpp"
#include "turned_queries.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Several sequences, and which of the rows of a tensor (1, heads, all queries, d_k) are the queries of the last tokens of each.
template <Scalar T>
struct sequence_batch {
    borrowed<const sequence<T>* const> sequences;
    borrowed<const index_t> starts = {}; ///< sequence e has the queries starts[e] .. starts[e + 1] - 1; query e if not given

    /// How many sequences there are.
    index_t entries() const { return std::ssize(sequences); }
    /// Sequence number e.
    const sequence<T>& operator[](index_t entry) const { return *sequences[static_cast<std::size_t>(entry)]; }
    /// The queries of a sequence.
    row_range queries(index_t entry) const {
        if (starts.empty()) return {entry, 1};
        const auto* const first = starts.data() + entry;
        return {first[0], first[1] - first[0]};
    }
    /// How much work a sequence is, beside the others: the pairs of its queries and tokens.
    index_t work(index_t entry) const { return detail::product(queries(entry).count, (*this)[entry].positions().count); }
};

namespace detail {

/// An operator that knows keys in pages: one of the kernels of softmax attention.
template <class Op, class T>
concept KnowsPages = Attention<Op> && HasResumable<Op, T>;

/// A call of attention to a sequence.
template <class Op, Scalar T>
class sequence_call {
public:
    /// Queries of the sequence's last tokens.
    sequence_call(const Op& op, const stored_view<const T>& queries, const sequence<T>& of, const outputs<T>& out)
        : sequence_call(op, queries, of.size() - queries.shape().tokens, of, out) {}
    /// Queries at the positions from first_query on, of whatever tokens.
    sequence_call(const Op& op, const stored_view<const T>& queries, index_t first_query, const sequence<T>& of, const outputs<T>& out)
        : op_(op), of_(of), out_(out), queries_(queries, first_query, of) {
        static_assert(KnowsPages<Op, T>, "attn: this operator cannot attend to a cache: softmax, sparse and pointwise attention can");
        const auto& l = of.pool().layout();
        const auto keys = of.positions();
        const shape of_keys{1, l.kv_heads, keys.count, l.key_channels}, of_values{1, l.kv_heads, keys.count, l.value_channels};
        // Shapes only: where the rows lie, the pages say.
        in_ = {queries, {&nowhere, of_keys, {0, 0, 0, 0}}, {&nowhere, of_values, {0, 0, 0, 0}}};
        in_.positions = {.first_query = first_query, .first_key = keys.first};
    }
    /// Throws attention_error unless all fits, and the queries are of tokens of the sequence.
    void check_last() const {
        const auto& q = in_.queries.shape();
        check_view(Op::name, "q", in_.queries);
        if (q.tokens > of_.size())
            detail::raise(
                shape_error(Op::name, "q", "has shape ", q, ", but the sequence has ", of_.size(), " tokens: they are of its last"));
        check();
    }
    /// Throws attention_error unless all fits.
    void check() const {
        const auto& q = in_.queries.shape();
        check_view(Op::name, "q", in_.queries);
        if (q.batch != 1) detail::raise(shape_error(Op::name, "q", "has shape ", q, ": a sequence is one batch entry"));
        op_.check(in_);
        check_outputs(op_, in_, out_);
        queries_.check(Op::name);
    }
    std::size_t workspace_bytes(index_t concurrency) const {
        return bytes_taken([&](scratch& memory) { return take_queries(memory, concurrency); });
    }
    /// Computes. All has been checked.
    void run(const execution& on) const {
        if (out_.values.shape().size() == 0 && out_.log_sum_exp.shape().size() == 0) return;
        const auto evicted = evicted_among_read(of_);
        auto in = in_;
        if (queries_.are_others()) {
            scratch memory(on.workspace().bytes().data());
            const auto turned = take_queries(memory, on.concurrency());
            queries_.write(turned);
            in.queries = turned;
        }
        if (evicted.empty()) run_with(op_.pattern, in, on);
        else run_with(op_.pattern & kept_keys{evicted}, in, on);
    }

private:
    using scheduler = typename Op::template scheduler<T, kernel::paged_storage>;
    static constexpr T nowhere{};

    /// The queries as a cache has keys, behind the memory of what computes.
    tensor_view<T> take_queries(scratch& memory, index_t concurrency) const {
        const auto& q = in_.queries.shape();
        memory.take<std::byte>(
            scheduler::workspace_bytes(shapes_of(in_), max_passes<decltype(op_.pattern)> > 1, concurrency, out_.values.is_narrow()));
        return head_major(queries_.are_others() ? memory.take<T>(q.size()) : nullptr, q);
    }
    template <Pattern P>
    void run_with(const P& pattern, const inputs<T>& in, const execution& on) const {
        const kernel::visible_keys_of<T, P> visible(pattern, shapes_of(in), in.positions);
        const auto& chain = op_.score_chain();
        const kernel::score_adjustment_of<T, std::remove_cvref_t<decltype(chain)>> adjustment(chain);
        auto call = softmax_call_of(op_, in, out_, visible, adjustment);
        const auto pages = of_.view();
        call.pages = &pages;
        scheduler::attend(call, on);
    }

    const Op& op_;
    const sequence<T>& of_;
    inputs<T> in_;
    outputs<T> out_;
    turned_queries<T> queries_;
};

/// Throws attention_error unless the queries of a batch are the rows of a tensor, and its sequences are there.
template <Scalar T>
void check_sequences(std::string_view operation, const sequence_batch<T>& batch, const stored_view<const T>& queries) {
    check_view(operation, "q", queries);
    if (!batch.starts.empty()) check_starts(operation, "starts", batch.starts, "q", queries);
    const auto rows = batch.starts.empty() ? queries.shape().tokens : std::ssize(batch.starts) - 1;
    if (rows != batch.entries())
        detail::raise(shape_error(operation, "sequences", "are ", batch.entries(), ", but there are queries of ", rows));
    for (const auto* of : batch.sequences)
        if (!of) detail::raise(argument_error(operation, "sequences", "hold a null pointer"));
}

} // namespace detail

/// Attention of the queries of a sequence's last tokens, q (1, heads, n, d_k), to all of its tokens that are not evicted: out (1, heads, n,
/// d_v) has the bits of attention to them as one tensor at their positions, keys and queries turned before if the pool has a
/// rotary_reading. What a page costs is what the pattern shows of it. `run` as in attend(op, in, out, run). Throws attention_error, before
/// anything is read or written, as that does, and if the sequence is shorter than q, or has positions that the rotary_reading's table has
/// not.
template <Attention A, Scalar T>
void attend(const A& op, const detail::read_stored<T>& q, const sequence<T>& of, const std::type_identity_t<outputs<T>>& out,
            const detail::call_execution& run = {}) {
    const detail::sequence_call<A, T> call(op, q, of, out);
    call.check_last();
    run.reserve(A::name, "q", q.shape(), call.workspace_bytes(run.concurrency()));
    call.run(run);
}

/// Attention to a sequence, to a new tensor: see attend(op, q, of, out, run).
template <Attention A, Scalar T>
[[nodiscard]] tensor<T> attend(const A& op, const detail::read_stored<T>& q, const sequence<T>& of,
                               const detail::call_execution& run = {}) {
    detail::check_view(A::name, "q", q);
    tensor<T> out({q.shape().batch, q.shape().heads, q.shape().tokens, of.pool().layout().value_channels});
    attend(op, q, of, outputs<T>{out}, run);
    return out;
}

/// Attention of the queries of several sequences, each to its own tokens: q (1, heads, all queries, d_k), out (1, heads, all queries, d_v).
/// The bits are those of a call for each. Sequences that are much of the work are computed by all threads, one after the other, the others
/// one on each. `run` as in attend(op, in, out, run). Throws attention_error, before anything is read or written, as a call for each would.
template <Attention A, Scalar T>
void attend(const A& op, const detail::read_stored<T>& q, const sequence_batch<T>& batch, const std::type_identity_t<outputs<T>>& out,
            const detail::call_execution& run = {}) {
    detail::check_sequences<T>(A::name, batch, q);
    const auto call = [&](index_t e) {
        const tensor_part rows{.tokens = batch.queries(e)};
        return detail::sequence_call<A, T>(op, q.slice(rows), batch[e], out.slice(rows));
    };
    if (out.values.shape().tokens != q.shape().tokens) detail::refuse_result(A::name, "out", out.values.shape(), q.shape());
    for (index_t e = 0; e < batch.entries(); ++e) call(e).check_last();
    const detail::ragged_bytes bytes(batch, run.concurrency(),
                                     [&](index_t e, index_t threads) { return call(e).workspace_bytes(threads); });
    run.reserve(A::name, "q", q.shape(), bytes.all);
    detail::for_each_entry(batch, bytes.of_a_thread, run, [&](index_t e, const execution& on) { call(e).run(on); });
}

} // namespace attn
