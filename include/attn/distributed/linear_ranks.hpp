// Linear attention over ranks: sums over the keys go from one to the next.
#pragma once

#include "../attention/linear_attention.hpp"
#include "key_stream.hpp"
#include "sequence_parallel.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <FeatureMap F, Pattern P, class Arch, Scalar T>
struct rank_call<linear_attention<F, P, Arch>, T> {
    using operation = linear_attention<F, P, Arch>;
    using order = kernel::linear_order<T, P>;
    using states = kernel::linear_states<T, Arch>;

    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), rank_(rank), plan_(parts.key_cuts(), needed_rows()), memory_{piece_memory<T>(plan_, rank, in), piece_memory<T>(plan_, rank, in)} {
        scratch counted;
        lay_out(counted);
        sums_memory_.reserve(counted.used_bytes());
        scratch own(sums_memory_.bytes().data());
        lay_out(own);
    }

    index_t fingerprint() const { return plan_.fingerprint(); }
    template <Storage U>
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        return op.template workspace_bytes<T>(shapes(parts, rank), concurrency);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        if (parts_.shapes().queries.size() == 0) return;
        auto own = in;
        own.positions.first_key = parts_.positions().first_key;
        own.keys = place(in.keys, parts_.keys(rank_).first), own.values = place(in.values, parts_.keys(rank_).first);
        key_stream<T, C> stream(ranks, plan_, in, parts_.keys(rank_), memory_);
        stream.run([&](index_t, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            own.keys = place(keys, rows.first), own.values = place(values, rows.first);
        });
        op_.with_kernel(own, [&](const auto& kernel) {
            if (numbers() > 0 && order::causal) hand_on(ranks, kernel, own, run);
            else if (numbers() > 0) share(ranks, kernel, own, run);
            kernel(own, out, run, run.workspace().bytes().data(), &sums_);
        });
    }

private:
    static input_shapes shapes(const partition& parts, index_t rank) {
        auto s = parts.shapes();
        s.queries.tokens = parts.queries(rank).count;
        return s;
    }
    /// Rows `first` and so on of all keys, as if the others lay before and behind: those are never read.
    stored_view<const T> place(const stored_view<const T>& rows, index_t first) const {
        auto s = rows.shape();
        s.tokens = parts_.shapes().keys.tokens;
        return {rows.data() ? rows.rows(0, 0, -first).data : nullptr, rows.format(), s, rows.strides()};
    }
    static index_t keys_of_span() { return kernel::span_sums<T, Arch>::span; }
    index_t batch() const { return parts_.shapes().queries.batch; }
    index_t kv_heads() const { return parts_.shapes().keys.heads; }
    /// Of sums.
    index_t numbers() const { return batch() * kv_heads(); }

    /// f(order of a rank's rows).
    auto with_order(index_t rank, const auto& f) const {
        const auto s = shapes(parts_, rank);
        const inputs<T> in{{nullptr, s.queries, {}}, {nullptr, s.keys, {}}, {nullptr, s.values, {}},
                           {parts_.positions().first_query[0] + parts_.queries(rank).first, parts_.positions().first_key}};
        return f(order{in, op_.pattern});
    }
    /// The keys that the first row of a rank takes as a sum.
    index_t summed(index_t rank, index_t b) const {
        return with_order(rank, [&](const order& rows) { return rows.absorbed_by(b, 0); });
    }
    index_t first_with_queries() const { return with_queries_after(-1); }
    /// The next rank that has rows; ranks() if none has.
    index_t with_queries_after(index_t rank) const {
        for (++rank; rank < parts_.ranks() && parts_.queries(rank).count == 0;) ++rank;
        return rank;
    }
    /// The first border of spans at or behind a key.
    index_t border(index_t key) const {
        if (key == 0) return 0;
        const auto m = parts_.shapes().keys.tokens;
        return std::min(m, key + floor_mod(-(parts_.positions().first_key[0] + key), keys_of_span()));
    }
    /// Of the spans that begin where a rank holds the keys.
    row_range spans_of(index_t rank) const { return rows_between(border(parts_.keys(rank).first), border(parts_.keys(rank).end())); }

    /// What each rank reads.
    std::vector<row_range> needed_rows() const {
        std::vector<row_range> all(static_cast<std::size_t>(parts_.ranks()));
        if (parts_.shapes().queries.size() == 0) return all;
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            auto& rows = all[static_cast<std::size_t>(rank)];
            const auto own = parts_.queries(rank);
            for (index_t b = 0; b < batch(); ++b) {
                const auto first = summed(rank, b);
                const auto end = own.count == 0 ? 0 : with_order(rank, [&](const order& o) { return o.seen_by(b, own.count - 1); });
                if (!order::causal) rows = spanned_rows(rows, common_rows(spans_of(rank), {0, first}));
                rows = spanned_rows(rows, rows_between(order::causal && rank == first_with_queries() ? 0 : first, end));
            }
        }
        return all;
    }
    void lay_out(scratch& memory) {
        const auto &k = parts_.shapes().keys, &v = parts_.shapes().values;
        const auto some = [&](index_t count) { return states::take(memory, count, k.channels, v.channels); };
        sums_ = some(numbers());
        spans_ = order::causal ? sums_ : some(numbers() * span_count());
        next_ = order::causal ? some(numbers()) : sums_;
    }
    index_t span_count() const { return (spans_of(rank_).count + keys_of_span() - 1) / keys_of_span() + 1; }
    /// The keys of one of the rank's spans.
    row_range span_rows(index_t number) const {
        const auto all = spans_of(rank_);
        auto first = all.first;
        for (; number > 0 && first < all.end(); --number) first = border(first + 1);
        return common_rows(rows_between(first, border(first + 1)), all);
    }

    /// Queries see different keys: each rank takes the sum of the keys before, and gives it with its own to the next, some heads at a time.
    template <Communicator C>
    void hand_on(C& ranks, const auto& kernel, const inputs<T>& in, const execution& run) {
        const auto first = first_with_queries();
        if (parts_.queries(rank_).count == 0) return;
        const auto next = with_queries_after(rank_);
        index_t before = first;
        while (before < rank_ && with_queries_after(before) < rank_) before = with_queries_after(before);
        const auto push = [&](index_t number, index_t from, index_t end, index_t slice, const states& to) {
            if (from < end) kernel.add_keys(in, number / kv_heads(), number % kv_heads(), from, end, slice, run.workspace().bytes().data(), to.of(number));
        };
        std::exception_ptr failure; // who has failed still passes on what others wait for
        std::vector<typename C::request> sending;
        for (index_t begin = 0; begin < numbers(); begin += run.concurrency()) { // one message for each, for ranks may have other executors
            const auto end = std::min(numbers(), begin + run.concurrency());
            for (auto number = begin; number < end && rank_ != first; ++number) {
                auto receiving = ranks.receive(before, 1, bytes_of(sums_, number, 1));
                ranks.wait(receiving);
            }
            const auto add = [&](index_t task, index_t slice) {
                const auto number = begin + task, own = summed(rank_, number / kv_heads());
                if (rank_ == first) {
                    sums_.of(number).reset();
                    push(number, 0, own, slice, sums_);
                }
                if (next == parts_.ranks()) return;
                std::ranges::copy(sums_.numbers(number), next_.numbers(number).begin());
                push(number, own, summed(next, number / kv_heads()), slice, next_);
            };
            if (!failure) failure = failure_of([&] { run.for_each(end - begin, add); });
            for (auto number = begin; number < end && next < parts_.ranks(); ++number) sending.push_back(ranks.send(next, 1, bytes_of(next_, number, 1)));
        }
        for (auto& message : sending) ranks.wait(message);
        if (failure) std::rethrow_exception(failure);
    }
    /// All queries see the same keys: spans are summed where they are, added up from rank to rank, and the sum is everyone's.
    template <Communicator C>
    void share(C& ranks, const auto& kernel, const inputs<T>& in, const execution& run) {
        const auto count = span_count();
        const auto add = [&](index_t task, index_t slice) {
            const auto number = task / count, b = number / kv_heads();
            const auto rows = common_rows(span_rows(task % count), {0, summed(rank_, b)});
            if (rows.count == 0) return;
            spans_.of(task).reset();
            kernel.add_keys(in, b, number % kv_heads(), rows.first, rows.end(), slice, run.workspace().bytes().data(), spans_.of(task));
        };
        const auto failure = failure_of([&] { run.for_each(numbers() * count, add); }); // who has failed still passes on what others wait for
        index_t before = -1;
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            if (spans_of(rank).count == 0) continue;
            if (rank == rank_ || before == rank_) {
                if (before < 0) {
                    for (index_t number = 0; number < numbers(); ++number) sums_.of(number).reset();
                } else {
                    auto message = rank == rank_ ? ranks.receive(before, 1, bytes_of(sums_, 0, numbers())) : ranks.send(rank, 1, bytes_of(sums_, 0, numbers()));
                    ranks.wait(message);
                }
            }
            before = rank;
            if (rank != rank_) continue;
            for (index_t task = 0; task < numbers() * count; ++task)
                if (common_rows(span_rows(task % count), {0, summed(rank_, task / count / kv_heads())}).count > 0) sums_.of(task / count).merge(spans_.of(task));
        }
        if (before >= 0) broadcast(ranks, before, bytes_of(sums_, 0, numbers()));
        if (failure) std::rethrow_exception(failure);
    }
    static std::span<std::byte> bytes_of(const states& of, index_t first, index_t count) {
        return std::as_writable_bytes(std::span(of.numbers(first).data(), static_cast<std::size_t>(count) * of.numbers(first).size()));
    }

    const operation& op_;
    const partition& parts_;
    index_t rank_;
    key_plan plan_;
    piece_memory<T> memory_[2];
    workspace sums_memory_;
    states sums_, spans_, next_; ///< of each batch entry and head: what the rank's rows take; of its spans; what the next rank is given
};

} // namespace attn::detail
