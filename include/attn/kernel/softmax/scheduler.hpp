// The scheduler: hands the tasks of a call of softmax attention to threads, with their memory.
#pragma once

#include "../../parallel/executor.hpp"
#include "task_grid.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Softmax attention of any pattern and score function: out = softmax(score(scale * q k^T), keys hidden by the pattern left out) v; or,
/// with another State than the softmax's, what that makes of scores. All at once, or by runs of keys, which the passes of a union are too.
/// Where there are fewer tasks than threads could do, and spans of keys are more, threads share the spans. E: what queries and keys,
/// weights and values are multiplied as. Stored: how the tensors may be stored.
template <Scalar T, class E = T, class Stored = any_storage, class State = softmax_state<T>>
class softmax_scheduler {
public:
    /// resumes: keys come in runs, or passes. narrow: the result is of 16-bit numbers.
    static std::size_t workspace_bytes(const input_shapes& s, bool resumes, index_t concurrency, bool narrow) {
        return detail::bytes_for<layout>(s, resumes, concurrency, narrow);
    }
    /// All keys of a call.
    static void attend(const softmax_call<T>& call, const execution& run) {
        const auto passes = call.pattern.passes();
        softmax_scheduler rows(call, run, passes > 1);
        if (passes == 1) return rows.visit({call, 0, true, true});
        for (index_t pass = 0; pass < passes; ++pass) rows.add_keys(call.in, pass);
        rows.finish();
    }

    /// The rows of a call, whose keys are to come.
    softmax_scheduler(const softmax_call<T>& call, const execution& run) : softmax_scheduler(call, run, true) {}
    void add_keys(const inputs<T>& in, index_t pass) {
        if (pass > 0) begin(); // in which not every head takes part
        visit({call_.of_keys(in), pass, !std::exchange(has_begun_, true), false});
    }
    void finish() {
        begin();
        if (call_.out.values.is_narrow() || call_.out.log_sum_exp.data()) visit_without_keys(false, true);
    }
    /// m and l of every row, of the keys so far.
    const row_sums<T>& sums() const { return own_.known; }

private:
    using grid_type = task_grid<T, E>;
    using walk_type = typename grid_type::walk;
    using mainloop_type = mainloop<T, E, Stored, State>;
    using epilogue_type = epilogue<T, Stored, State>;
    using state_type = softmax_state<T>;

    /// The memory of a call.
    struct layout {
        row_sums<T> known;
        index_t span_count;
        state_type* spans = nullptr; ///< of which threads share one query block
        std::uint64_t* span_rows;    ///< those that each has finished
        T* wide;                     ///< rows of the query block of each thread, where the result would round them
        index_t wide_size;
        detail::slices slices;

        layout(detail::scratch& memory, const input_shapes& s, bool resumes, index_t concurrency, bool narrow)
            : wide_size(narrow && !resumes ? query_block_traits<T, E>::max_rows * s.values.channels : 0) {
            const auto rows = [&] { return resumes ? memory.take<T>(s.queries.batch, s.queries.heads, s.queries.tokens) : nullptr; };
            known.maximum = rows();
            known.sum = rows();
            if (narrow && resumes) known.values = memory.take<T>(s.queries.batch * s.queries.heads, s.queries.tokens, s.values.channels);
            wide = memory.take<T>(concurrency, wide_size);
            span_count = concurrency > 1 ? 2 * concurrency : 0;
            spans = memory.take<state_type>(span_count);
            span_rows = memory.take<std::uint64_t>(span_count);
            for (index_t i = 0; i < span_count; ++i) {
                const auto state = state_type::take(memory, query_block_traits<T, E>::max_rows, whole_registers<T>(s.values.channels));
                if (spans) spans[i] = state;
            }
            slices = detail::slices(memory, concurrency, detail::bytes_for<mainloop_type>(s));
        }
        mainloop_type loop_of(const softmax_call<T>& call, index_t slice) const {
            auto slice_memory = slices[slice];
            return mainloop_type(slice_memory, shapes_of(call.in), &call);
        }
    };

    /// All rows, with the keys of a call. begins: no others have come. finishes: none will.
    struct step {
        softmax_call<T> call;
        index_t pass;
        bool begins, finishes;
    };

    softmax_scheduler(const softmax_call<T>& call, const execution& run, bool resumes) : call_(call), run_(run), own_(take(resumes)) {}
    layout take(bool resumes) const {
        detail::scratch memory(run_.workspace().bytes().data());
        return {memory, shapes_of(call_.in), resumes, run_.concurrency(), call_.out.values.is_narrow()};
    }

    void begin() {
        if (!std::exchange(has_begun_, true)) visit_without_keys(true, false);
    }
    void visit_without_keys(bool begins, bool finishes) const {
        const auto none = call_.in.slice({}, {.tokens = {}});
        visit({call_.of_keys(none), 0, begins, finishes});
    }
    void visit(const step& now) const {
        const auto& q = call_.in.queries.shape();
        if (q.batch == 0 || q.heads == 0 || q.tokens == 0) return;
        const grid_type tasks(now.call, now.pass, run_.concurrency());
        const auto count = tasks.count();
        if (run_.concurrency() > 1 && count < std::min(2 * run_.concurrency(), tasks.spans())) {
            share_spans(now, {tasks, 0, count});
        } else { // some at a time: so a thread knows what comes next
            const auto parts = run_.concurrency() == 1 && !run_.pauses() ? 1 : std::min(count, 16 * run_.concurrency());
            run_.for_each(
                parts, [&](index_t part, index_t slice) { visit(now, {tasks, count * part / parts, count * (part + 1) / parts}, slice); });
        }
    }

    epilogue_type begin_rows(const step& now, const query_block& block, index_t slice) const {
        return {block, call_.out, own_.wide + slice * own_.wide_size, own_.known, call_.sinks, now.begins};
    }
    void end_rows(const step& now, const epilogue_type& rows) const {
        if (now.finishes) rows.finish();
        else rows.keep(own_.known);
    }

    /// The query blocks of one thread.
    void visit(const step& now, walk_type blocks, index_t slice) const {
        auto loop = own_.loop_of(now.call, slice);
        query_block block, next;
        for (bool more = blocks.next(block); more; block = next) {
            more = blocks.next(next);
            const auto keys = now.call.blocks_of(block);
            loop.begin(block, more ? &next : nullptr, now.pass);
            if (!now.begins && !now.finishes && !loop.sees(keys.first_block(), keys.end_block())) continue; // its rows stay as they are
            auto rows = begin_rows(now, block, slice);
            loop.run(keys.first_block(), keys.end_block(), [&](const state_type& state, std::uint64_t done) { rows.merge(state, done); });
            end_rows(now, rows);
        }
    }
    /// Query blocks on all threads: each takes a span of keys, some spans at a time, which merge in order.
    void share_spans(const step& now, walk_type blocks) const {
        constexpr auto size = visible_span::max_blocks;
        for (query_block block; blocks.next(block);) {
            block.shares_masks = false;
            auto rows = begin_rows(now, block, 0);
            const auto keys = now.call.blocks_of(block);
            const auto end = floor_div(keys.end_block() - 1, size) + 1;
            const auto visible_from = [&](index_t block_of_keys) {
                const auto found = first_visible_block(now.call.pattern, block, now.pass, keys, block_of_keys, keys.end_block());
                return found < keys.end_block() ? floor_div(found, size) : end;
            };
            for (auto first = visible_from(keys.first_block()); first < end; first = visible_from((first + own_.span_count) * size)) {
                const auto some = std::min(own_.span_count, end - first);
                run_.for_each(some, [&](index_t span, index_t slice) {
                    auto loop = own_.loop_of(now.call, slice);
                    own_.span_rows[span] = 0;
                    loop.begin(block, nullptr, now.pass);
                    loop.run(std::max(keys.first_block(), (first + span) * size), std::min(keys.end_block(), (first + span + 1) * size),
                             [&](const state_type& state, std::uint64_t done) {
                                 own_.spans[span].copy(state, done);
                                 own_.span_rows[span] |= done;
                             });
                });
                for (index_t span = 0; span < some; ++span) rows.merge(own_.spans[span], own_.span_rows[span]);
            }
            end_rows(now, rows);
        }
    }

    softmax_call<T> call_;
    const execution& run_;
    layout own_;
    bool has_begun_ = false;
};

} // namespace attn::kernel
