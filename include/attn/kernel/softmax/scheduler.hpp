// The scheduler: hands the tasks of a call of softmax attention to threads, with their memory.
#pragma once

#include "../../parallel/executor.hpp"
#include "task_grid.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Softmax attention of any pattern and score function: out = softmax(score(scale * q k^T), keys hidden by the pattern left out) v. Passes
/// of a union run one after the other. Where there are fewer tasks than threads could do, and spans of keys are more, threads share the
/// spans. E: what queries and keys, weights and values are multiplied as.
template <Scalar T, class E = T>
class softmax_scheduler {
public:
    /// narrow: the result is of 16-bit numbers.
    static std::size_t workspace_bytes(const input_shapes& s, index_t passes, index_t concurrency, bool narrow) {
        return layout_bytes(s, passes > 1, concurrency, narrow);
    }
    /// Bytes of workspace that add_keys needs. narrow: the result is of 16-bit numbers.
    static std::size_t run_workspace_bytes(const input_shapes& s, index_t concurrency, bool narrow) {
        return layout_bytes(s, true, concurrency, narrow);
    }

    void operator()(const softmax_call<T>& call, const execution& run) const {
        for (index_t pass = 0; pass < call.pattern.passes(); ++pass) attend(call, pass, pass == 0, call.pattern.passes() > 1, run);
    }
    /// Attends to keys that come in runs of whole spans: pass by pass, each in the order of positions. The call has the keys of one run,
    /// while its pattern knows of all; the workspace keeps what the next run goes on with. After each run, all rows are as if it had been
    /// the last.
    void add_keys(const softmax_call<T>& call, index_t pass, bool is_first, const execution& run) const {
        attend(call, pass, is_first, true, run);
    }

private:
    using grid_type = task_grid<T, E>;
    using walk_type = typename grid_type::walk;
    using mainloop_type = mainloop<T, E>;
    using state_type = softmax_state<T>;

    /// The memory of a call.
    struct layout {
        row_sums<T> known;
        index_t span_count;
        state_type* spans = nullptr; ///< of which threads share one query block
        std::uint64_t* span_rows;    ///< those that each has finished
        T* wide;                     ///< rows of the query block of each thread, where the result would round them
        index_t wide_size;
        std::byte* slices; ///< of each thread
        std::size_t slice_bytes;

        /// keeps: rows are handed on, to another pass or run of keys.
        layout(detail::scratch& memory, const input_shapes& s, bool keeps, index_t concurrency, bool narrow)
            : wide_size(narrow && !keeps ? query_block_traits<T, E>::max_rows * s.values.channels : 0),
              slice_bytes(mainloop_type::bytes(s.keys, s.values)) {
            const auto rows = [&] { return keeps ? memory.take<T>(s.queries.batch, s.queries.heads, s.queries.tokens) : nullptr; };
            known.maximum = rows();
            known.sum = rows();
            if (narrow && keeps) known.values = memory.take<T>(s.queries.batch * s.queries.heads, s.queries.tokens, s.values.channels);
            wide = memory.take<T>(concurrency, wide_size);
            span_count = concurrency > 1 ? 2 * concurrency : 0;
            spans = memory.take<state_type>(span_count);
            span_rows = memory.take<std::uint64_t>(span_count);
            for (index_t i = 0; i < span_count; ++i) {
                const auto state = state_type::take(memory, query_block_traits<T, E>::max_rows, whole_registers<T>(s.values.channels));
                if (spans) spans[i] = state;
            }
            slices = memory.take<std::byte>(concurrency, static_cast<index_t>(slice_bytes));
        }
        mainloop_type loop_of(const softmax_call<T>& call, index_t slice) const {
            detail::scratch own(slices + static_cast<std::size_t>(slice) * slice_bytes);
            return mainloop_type(own, call);
        }
    };

    static std::size_t layout_bytes(const input_shapes& s, bool keeps, index_t concurrency, bool narrow) {
        detail::scratch memory;
        layout(memory, s, keeps, concurrency, narrow);
        return memory.used_bytes();
    }

    /// One pass over the keys of the call. is_first: no other has been there.
    static void attend(const softmax_call<T>& call, index_t pass, bool is_first, bool keeps, const execution& run) {
        const auto s = shapes_of(call.in);
        if (s.queries.batch == 0 || s.queries.heads == 0 || s.queries.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        layout own(memory, s, keeps, run.concurrency(), call.out.values.is_narrow());
        if (call.kept.maximum) std::tie(own.known.maximum, own.known.sum) = std::pair(call.kept.maximum, call.kept.sum);
        const grid_type tasks(call, pass, run.concurrency());
        const auto count = tasks.count();
        if (run.concurrency() > 1 && count < std::min(2 * run.concurrency(), tasks.spans())) {
            share_spans(call, {tasks, 0, count}, pass, is_first, own, run);
        } else { // some at a time: so a thread knows what comes next
            const auto parts = run.concurrency() == 1 ? 1 : std::min(count, 16 * run.concurrency());
            run.for_each(parts, [&](index_t part, index_t slice) {
                attend(call, {tasks, count * part / parts, count * (part + 1) / parts}, pass, is_first, own, slice);
            });
        }
    }

    static epilogue<T> begin_rows(const softmax_call<T>& call, const query_block& block, bool is_first, const layout& own, index_t slice) {
        T* const wide = own.wide + slice * own.wide_size;
        if (is_first) return {block, call.out, wide, own.known, call.sinks};
        return {block, call.out, wide, own.known};
    }
    static void finish_rows(const epilogue<T>& rows, const layout& own) {
        rows.finish();
        if (own.known.maximum) rows.keep(own.known);
    }

    /// Attends to the query blocks of one thread.
    static void attend(const softmax_call<T>& call, walk_type blocks, index_t pass, bool is_first, const layout& own, index_t slice) {
        auto loop = own.loop_of(call, slice);
        query_block block, next;
        for (bool more = blocks.next(block); more; block = next) {
            more = blocks.next(next);
            const auto keys = call.blocks_of(block);
            loop.begin(block, more ? &next : nullptr, pass);
            if (is_first || loop.sees(keys.first_block(), keys.end_block())) { // else its rows stay as they are
                auto rows = begin_rows(call, block, is_first, own, slice);
                loop.run(keys.first_block(), keys.end_block(),
                         [&](const state_type& state, std::uint64_t done) { rows.merge(state, done); });
                finish_rows(rows, own);
            }
            if (call.between_blocks) (*call.between_blocks)(slice);
        }
    }
    /// Query blocks on all threads: each takes a span of keys, some spans at a time, which merge in order.
    static void share_spans(const softmax_call<T>& call, walk_type blocks, index_t pass, bool is_first, const layout& own,
                            const execution& run) {
        constexpr auto size = visible_span::max_blocks;
        for (query_block block; blocks.next(block);) {
            block.shares_masks = false;
            auto rows = begin_rows(call, block, is_first, own, 0);
            const auto keys = call.blocks_of(block);
            const auto end = floor_div(keys.end_block() - 1, size) + 1;
            const auto visible_from = [&](index_t block_of_keys) {
                const auto found = first_visible_block(call.pattern, block, pass, keys, block_of_keys, keys.end_block());
                return found < keys.end_block() ? floor_div(found, size) : end;
            };
            for (auto first = visible_from(keys.first_block()); first < end; first = visible_from((first + own.span_count) * size)) {
                const auto some = std::min(own.span_count, end - first);
                run.for_each(some, [&](index_t span, index_t slice) {
                    auto loop = own.loop_of(call, slice);
                    own.span_rows[span] = 0;
                    loop.begin(block, nullptr, pass);
                    loop.run(std::max(keys.first_block(), (first + span) * size), std::min(keys.end_block(), (first + span + 1) * size),
                             [&](const state_type& state, std::uint64_t done) {
                                 own.spans[span].copy(state, done);
                                 own.span_rows[span] |= done;
                             });
                });
                for (index_t span = 0; span < some; ++span) rows.merge(own.spans[span], own.span_rows[span]);
                if (call.between_blocks) (*call.between_blocks)(0);
            }
            finish_rows(rows, own);
        }
    }
};

} // namespace attn::kernel
