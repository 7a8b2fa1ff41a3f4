// Softmax attention over ranks, and what else takes its keys in runs: keys and values travel. And talking-heads attention: the keys that a
// rank sees are gathered there.
#pragma once

#include "../attention/pointwise_attention.hpp"
#include "../attention/resumable.hpp"
#include "../attention/softmax_attention.hpp"
#include "../attention/talking_heads_attention.hpp"
#include "key_stream.hpp"
#include "rank_call.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <Attention A, Scalar T>
    requires HasResumable<A, T>
struct rank_call<A, T> {
    using operation = A;
    using rows_type = resumable<operation, T>;

    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), where_(parts.positions()), visible_(op.pattern, parts.shapes(), where_),
          plan_({visible_, parts.shapes().queries, where_.first_query[0], where_.first_key[0]}, parts.query_cuts(), parts.key_cuts()),
          memory_(plan_, rank, in) {}

    static void check(const operation& op, const partition& parts, index_t, const inputs<T>& in) { check_with_all_keys(op, parts, in); }

    index_t fingerprint() const { return plan_.fingerprint(); }
    template <Storage U>
    static std::size_t workspace_bytes(const operation&, const partition& parts, index_t rank, index_t concurrency) {
        return rows_type::workspace_bytes(parts.shapes(rank), concurrency, Narrow<U>);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        key_stream<T, C> stream(ranks, plan_, in, parts_.keys(ranks.rank()), memory_);
        const auto progress = [&](index_t) { stream.progress(); };
        const pausing_execution pausing(run, progress);
        rows_type attended(op_, visible_, in, out, pausing);
        std::exception_ptr failure;
        stream.run([&](index_t number, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            if (failure) return; // who has failed still passes on what others wait for
            const inputs<T> part{in.queries, keys, values, {in.positions.first_query, where_.first_key[0] + rows.first}};
            failure = failure_of([&] { attended.add_keys(part, plan_.piece(number).pass); });
        });
        if (failure) std::rethrow_exception(failure);
        attended.finish();
    }

private:
    const operation& op_;
    const partition& parts_;
    positions where_;
    kernel::visible_keys_of<T, decltype(A::pattern)> visible_;
    key_plan plan_;
    stream_memory<T> memory_;
};

template <Pattern P, ScoreFunction S, Scalar T>
struct rank_call<talking_heads_attention<P, S>, T> {
    using operation = talking_heads_attention<P, S>;

    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), rank_(rank), plan_(parts.key_cuts(), needed_rows(op, parts)), memory_(plan_, rank, in) {}

    static void check(const operation& op, const partition& parts, index_t, const inputs<T>& in) { check_with_all_keys(op, parts, in); }

    index_t fingerprint() const { return plan_.fingerprint(); }
    template <Storage U>
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        auto s = parts.shapes(rank);
        s.keys.tokens = s.values.tokens = needed_rows(op, parts)[static_cast<std::size_t>(rank)].count;
        return workspace_bytes_for<U>(op, s, concurrency);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        auto gathered = in.slice({}, no_tokens);
        key_stream<T, C> stream(ranks, plan_, in, parts_.keys(rank_), memory_);
        stream.run([&](index_t, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            gathered.keys = keys, gathered.values = values;
            gathered.positions.first_key = parts_.positions().first_key[0] + rows.first;
        });
        forward_checked(op_, gathered, out, run);
    }

private:
    /// The keys of each rank: from the first that its queries see to the last.
    static std::vector<row_range> needed_rows(const operation& op, const partition& parts) {
        const auto& whole = parts.shapes();
        const auto where = parts.positions();
        auto queries = whole.queries;
        queries.heads = op.log_sum_exp_shape(whole).heads; // of the mixed ones, which the pattern is of
        const kernel::visible_keys_of<T, P> visible(op.pattern, whole, where);
        const key_plan plan({visible, queries, where.first_query[0], where.first_key[0]}, parts.query_cuts(), parts.key_cuts());
        std::vector<row_range> all(static_cast<std::size_t>(parts.ranks()));
        for (index_t number = 0; number < plan.pieces(); ++number)
            for (index_t rank = 0; rank < parts.ranks(); ++rank) {
                auto& rows = all[static_cast<std::size_t>(rank)];
                rows = spanned_rows(rows, plan.seen(number, rank));
            }
        return all;
    }

    const operation& op_;
    const partition& parts_;
    index_t rank_;
    key_plan plan_;
    stream_memory<T> memory_;
};

} // namespace attn::detail
