// The scheduler: cuts a call of softmax attention into tasks, by its shape alone.
#pragma once

#include "../../parallel/executor.hpp"
#include "mainloop.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Softmax attention of any pattern and score function: out = softmax(score(scale * q k^T), keys hidden by the pattern left out) v. A task is
/// one query block, or those of one residue class that share their copied keys. Passes of a union run one after the other.
template <Scalar T, class Arch, class Prefetch = prefetch_next>
class softmax_scheduler {
public:
    static std::size_t workspace_bytes(const input_shapes& s, index passes, index concurrency) {
        detail::scratch memory;
        between_passes(memory, s.queries, passes);
        return memory.used_bytes() + static_cast<std::size_t>(concurrency) * mainloop_type::bytes(s.keys, s.values);
    }

    void operator()(const softmax_call<T>& call, const execution& run) const {
        const auto s = shapes_of(call.in);
        if (s.queries.batch == 0 || s.queries.heads == 0 || s.queries.tokens == 0) return;
        const auto passes = call.pattern.passes();
        detail::scratch memory(run.workspace().bytes().data());
        const auto known = between_passes(memory, s.queries, passes);
        std::byte* const slices = run.workspace().bytes().data() + memory.used_bytes();
        const block_grid grid(s, call.pattern.heads_alike());
        for (index pass = 0; pass < passes; ++pass) {
            index tasks = 0;
            for (index place = 0; place < grid.places(); ++place) {
                const auto block = grid.heads_at(place);
                tasks = std::max(tasks, grid.tasks(call.pattern.step(block.batch, block.first_head, pass)));
            }
            /// Block `number` of a task, if there is one.
            const auto block_of = [&](index task, index number) -> std::optional<query_block> {
                if (task >= grid.places() * tasks) return {};
                auto block = grid.heads_at(task / tasks);
                const auto step = call.pattern.step(block.batch, block.first_head, pass);
                const auto together = grid.blocks_together(step);
                number += task % tasks * together;
                if (number >= std::min((task % tasks + 1) * together, grid.blocks(step))) return {};
                const auto first_query = call.in.positions.first_query[block.batch];
                block.tokens = grid.tokens_at(number, first_query, step);
                block.first_row = block.tokens.first - first_query;
                return block;
            };
            run.for_each(grid.places() * tasks, [&](index task, index slice) {
                detail::scratch own(slices + static_cast<std::size_t>(slice) * mainloop_type::bytes(s.keys, s.values));
                mainloop_type loop(own, call);
                index number = 0;
                for (auto block = block_of(task, number); block;) {
                    auto next = block_of(task, ++number);
                    const auto after = next ? next : block_of(task + run.concurrency(), 0);
                    attend(loop, call, *block, after ? &*after : nullptr, pass, known);
                    block = next;
                }
            });
        }
    }

private:
    using mainloop_type = mainloop<T, Arch, Prefetch>;
    using traits = query_block_traits<T, Arch>;

    /// The query blocks of a call.
    struct block_grid {
        index batch, heads, kv_heads, tokens, together; ///< heads that share a block

        block_grid(const input_shapes& s, bool heads_alike)
            : batch(s.queries.batch), heads(s.queries.heads), kv_heads(s.keys.heads), tokens(s.queries.tokens),
              together(heads_alike ? std::clamp<index>(traits::max_rows / tokens, 1, heads / kv_heads) : 1) {}

        /// Heads of a batch entry that come together.
        index places() const { return batch * kv_heads * places_of_group(); }
        query_block heads_at(index place) const {
            const auto group = heads / kv_heads, within = place % places_of_group() * together;
            const auto kv_head = place / places_of_group() % kv_heads;
            return {.batch = place / places_of_group() / kv_heads,
                    .first_head = kv_head * group + within,
                    .heads = std::min(together, group - within),
                    .kv_head = kv_head};
        }
        index blocks(index step) const { return step == 0 ? 0 : tile_count(tokens, most_tokens(step), step); }
        query_tile tokens_at(index number, index first_query, index step) const {
            return tile_at(number, first_query, tokens, most_tokens(step), step, together > 1 ? 0 : traits::lane_count);
        }
        /// Blocks of one residue class follow each other, for which its keys are copied once.
        index blocks_together(index step) const {
            if (step <= 1) return 1;
            return std::clamp<index>(tile_count(tokens / step, most_tokens(step)), 1, 256 / most_tokens(step) + 1);
        }
        index tasks(index step) const { return (blocks(step) + blocks_together(step) - 1) / blocks_together(step); }

    private:
        index places_of_group() const { return (heads / kv_heads + together - 1) / together; }
        index most_tokens(index step) const {
            return together > 1 ? tokens : traits::rows_of((tokens + step - 1) / step);
        }
    };

    /// m and l of every row (batch, heads, n), which the passes of a union hand on.
    struct row_sums {
        T *maximum, *sum;
    };
    static row_sums between_passes(detail::scratch& memory, const shape& queries, index passes) {
        const auto rows = [&] { return passes > 1 ? memory.take<T>(queries.batch, queries.heads, queries.tokens) : nullptr; };
        T* const maximum = rows();
        return {maximum, rows()};
    }
    static void attend(mainloop_type& loop, const softmax_call<T>& call, const query_block& block, const query_block* next, index pass,
                       const row_sums& known) {
        const auto& q = call.in.queries.shape();
        const auto number_of = [&](index row) { return (block.batch * q.heads + block.head_of(row)) * q.tokens + block.token_of(row); };
        finished_rows<T> rows;
        if (pass == 0) rows.begin(block, call.sinks);
        for (index row = 0; row < (pass > 0 ? block.rows() : 0); ++row) {
            rows.maximum[row] = known.maximum[number_of(row)];
            rows.sum[row] = known.sum[number_of(row)];
        }
        const epilogue<T, Arch> end(block, call.out);
        auto written = pass == 0 ? std::uint64_t{0} : ~std::uint64_t{0};
        loop.begin(block, next, pass);
        const auto blocks = call.blocks_of(block);
        loop.run(blocks.first_block(), blocks.end_block(), [&](const auto& state, std::uint64_t finished, T unit) {
            end.merge(finished, finished & ~written, state, unit, rows);
            written |= finished;
        });
        end.clear_rows(~written & bit_range(0, block.rows()));
        for (index row = 0; row < (call.pattern.passes() > 1 ? block.rows() : 0); ++row) {
            known.maximum[number_of(row)] = rows.maximum[row];
            known.sum[number_of(row)] = rows.sum[row];
        }
        end.write_log_sum_exp(rows);
    }
};

} // namespace attn::kernel
