// Linformer over ranks: what projects keys and values goes from one to the next, and the projected rows are everyone's.
#pragma once

#include "../attention/linformer_attention.hpp"
#include "key_stream.hpp"
#include "projection_shares.hpp"
#include "rank_call.hpp"

#include <numeric>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <class E, class F, Pattern P, Scalar T>
struct rank_call<linformer_attention<E, F, P>, T> {
    using operation = linformer_attention<E, F, P>;
    using work = kernel::linformer_work<T, operation>;
    using rows_type = typename work::rows_type;

    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), rank_(rank), plan_(parts.key_cuts(), needed_rows()), memory_(plan_, rank, in), rows_(find_rows(in)) {
        const auto &k = parts.shapes().keys, &v = parts.shapes().values;
        if (parts.ranks() > 1)
            exchanged_.reserve(
                static_cast<std::size_t>(product(heads(), rows_.max_rows, k.channels + v.channels, static_cast<index_t>(sizeof(T)))));
    }

    /// Checks the operator against all tokens: every rank has the parameters for them.
    static void check(const operation& op, const partition& parts, index_t, const inputs<T>& in) { op.check(whole_inputs(parts, in)); }
    /// A number that ranks compare to see that the same travels: tokens, and projected rows.
    index_t fingerprint() const {
        mixed_numbers all;
        all.mix(plan_.fingerprint());
        for (index_t head = 0; head < heads(); ++head)
            for (index_t at = 0; at < rows_.kept_count[head]; ++at) {
                const auto row = rows_.kept[head * rows_.max_rows + at];
                all.mix(head, row, shares_of(op_.key_projection, head).maker_of(row), shares_of(op_.for_values(), head).maker_of(row));
            }
        return all.number();
    }
    template <Storage U>
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        const auto& k = parts.shapes().keys;
        scratch memory, of_rows;
        const rows_type found(of_rows, op, k, k.batch, k.heads);
        work(memory, op, shapes(parts, rank), concurrency, 0, &found);
        return memory.used_bytes();
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        if (parts_.shapes().queries.size() == 0) return;
        auto own = in;
        const auto gather = [&](const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            own.keys = keys.slice(as_rows_from(rows.first, tokens())), own.values = values.slice(as_rows_from(rows.first, tokens()));
        };
        gather(parts_.keys(rank_), in.keys, in.values);
        key_stream<T, C> stream(ranks, plan_, in, parts_.keys(rank_), memory_);
        stream.run([&](index_t, const auto&... piece) { gather(piece...); });

        scratch memory(run.workspace().bytes().data());
        const work w(memory, op_, shapes(parts_, rank_), run.concurrency(), 0, &rows_);
        const auto failure = project(ranks, w, own, run); // who has failed still passes on what others wait for
        exchange(ranks, w);
        if (failure) std::rethrow_exception(failure);
        if (in.queries.shape().size() > 0) w.attend_some(op_, own, out, run, all());
    }

private:
    static constexpr bool any_sums = ResumableProjection<E, T> || ResumableProjection<F, T>;
    static input_shapes shapes(const partition& parts, index_t rank) {
        auto s = parts.shapes();
        s.queries.tokens = parts.queries(rank).count;
        return s;
    }
    index_t tokens() const { return parts_.shapes().keys.tokens; }
    index_t kv_heads() const { return parts_.shapes().keys.heads; }
    /// How many kv heads all batch entries have together.
    index_t heads() const { return parts_.shapes().keys.batch * kv_heads(); }
    typename work::part all() const { return {0, parts_.shapes().keys.batch, 0, kv_heads()}; }

    /// The shares of a projection in a head of any batch entry.
    template <class Projected>
    auto shares_of(const Projected& projection, index_t head) const {
        return projection_shares<T, Projected>(projection, head % kv_heads(), parts_.key_cuts());
    }
    /// The tokens that each rank reads.
    std::vector<row_range> needed_rows() const {
        std::vector<row_range> all(static_cast<std::size_t>(parts_.ranks()));
        const auto add = [&](index_t rank, const row_range& read) {
            auto& rows = all[static_cast<std::size_t>(rank)];
            rows = spanned_rows(rows, read);
        };
        for (index_t head = 0; head < kv_heads() && parts_.shapes().queries.size() > 0; ++head) {
            shares_of(op_.key_projection, head).for_each_read(add);
            shares_of(op_.for_values(), head).for_each_read(add);
        }
        return all;
    }
    /// The projected rows that there are, in all heads.
    rows_type find_rows(const inputs<T>& in) {
        const auto& k = parts_.shapes().keys;
        const auto rows = taken_of(rows_memory_, [&](scratch& memory) { return rows_type(memory, op_, k, k.batch, k.heads); });
        for (index_t head = 0; head < heads(); ++head) rows.find(op_, whole_inputs(parts_, in), head / kv_heads(), head % kv_heads(), head);
        return rows;
    }
    /// The projected rows of a block.
    std::span<std::byte> bytes_of(const work& w, const inputs<T>& in, index_t number) const {
        return w.with_block(op_, in, number, [&](const auto&, const auto&, const tensor_view<T>& to, index_t head, index_t first) {
            const auto count = std::clamp<index_t>(rows_.kept_count[head] - first, 0, work::rows_of_block) * to.shape().channels;
            return std::as_writable_bytes(
                std::span(to.data() + (head * rows_.max_rows + first) * to.shape().channels, static_cast<std::size_t>(count)));
        });
    }

    /// The rows that are made here, and the rank's part of sums. Returns a failure.
    std::exception_ptr project(Communicator auto& ranks, const work& w, const inputs<T>& in, const execution& run) const {
        const auto piece = [&](index_t number) {
            const auto bytes = bytes_of(w, in, number);
            return w.with_block(op_, in, number, [&](const auto& projection, const auto&, const auto&, index_t head, index_t) {
                const auto link = shares_of(projection, head).link_of(rank_);
                return relayed_bytes{link.before, link.next, bytes, bytes};
            });
        };
        const auto blocks = w.block_count(all());
        return relay(ranks, blocks, any_sums ? run.concurrency() : blocks, piece, [&](index_t first, index_t end) {
            run.for_each(end - first, [&](index_t task, index_t slice) {
                w.for_each_run(op_, in, all(), first + task, slice, [&](const auto&... of_run) { project_run(of_run...); });
            });
        });
    }
    /// Projects what is the rank's of a run of rows of a head.
    void project_run(const auto& projection, const kernel::token_rows<T>& x, index_t head, index_t row, index_t count,
                     const row_block<T>& to, const scratch& memory) const {
        const auto shares = shares_of(projection, head);
        if constexpr (shares.sums) {
            auto own = memory;
            if (const auto parts = shares.link_of(rank_).parts; parts.count > 0)
                projection.project_parts(x, head, row, count, parts.first, parts.end(), to, own);
        } else {
            const auto is_here = [&](index_t r) { return r < count && shares.maker_of(row + r) == rank_; };
            for (index_t first = 0; first < count;) {
                auto end = first;
                while (is_here(end)) ++end;
                auto own = memory;
                if (first < end)
                    projection.project(x, head, row + first, end - first, row_block<T>{to.data + first * to.row_stride, to.row_stride, 1},
                                       own);
                first = end + 1;
            }
        }
    }

    /// Calls f(maker, numbers) for the projected rows that are kept, the same on all ranks.
    void for_each_row(const work& w, const auto& f) const {
        const auto of_side = [&](const auto& projection, const tensor_view<T>& rows, index_t head) {
            const auto channels = rows.shape().channels;
            for (index_t at = 0; at < rows_.kept_count[head]; ++at)
                f(shares_of(projection, head).maker_of(rows_.kept[head * rows_.max_rows + at]),
                  std::span(rows.data() + (head * rows_.max_rows + at) * channels, static_cast<std::size_t>(channels)));
        };
        for (index_t head = 0; head < heads(); ++head) {
            of_side(op_.key_projection, w.keys, head);
            of_side(op_.for_values(), w.values, head);
        }
    }
    /// Exchanges the projected rows, until every rank has those of all.
    void exchange(Communicator auto& ranks, const work& w) const {
        if (parts_.ranks() == 1) return;
        std::vector<std::size_t> count(static_cast<std::size_t>(parts_.ranks())), begin(count.size());
        for_each_row(w, [&](index_t maker, const auto& numbers) { count[static_cast<std::size_t>(maker)] += numbers.size(); });
        std::exclusive_scan(count.begin(), count.end(), begin.begin(), std::size_t{0});
        auto* const all = reinterpret_cast<T*>(exchanged_.bytes().data());
        auto at = begin;
        for_each_row(w, [&](index_t maker, const auto& numbers) {
            auto& to = at[static_cast<std::size_t>(maker)];
            if (maker == rank_) std::ranges::copy(numbers, all + to);
            to += numbers.size();
        });
        for (std::size_t rank = 0; rank < count.size(); ++rank)
            if (count[rank] > 0)
                broadcast(ranks, static_cast<index_t>(rank), std::as_writable_bytes(std::span(all + begin[rank], count[rank])));
        at = begin;
        for_each_row(w, [&](index_t maker, const auto& numbers) {
            auto& from = at[static_cast<std::size_t>(maker)];
            if (maker != rank_) std::copy_n(all + from, numbers.size(), numbers.begin());
            from += numbers.size();
        });
    }

    const operation& op_;
    const partition& parts_;
    index_t rank_;
    key_plan plan_;
    stream_memory<T> memory_;
    workspace rows_memory_, exchanged_;
    rows_type rows_; ///< of all heads
};

} // namespace attn::detail
