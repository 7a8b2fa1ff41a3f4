// The tasks of a call of softmax attention: which query blocks belong together.
#pragma once

#include "mainloop.hpp"

#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The query blocks of one pass, by its shape and pattern alone: a place is a head, or some that share a block; the tokens of a place are cut
/// into blocks of even size. A task is a part of these for one place; or for all heads that see the same, so that a mask is made once.
template <Scalar T, class Arch>
class task_grid {
public:
    /// Query blocks of which one task keeps the masks.
    static constexpr index max_blocks = mainloop<T, Arch>::max_blocks;

    task_grid(const softmax_call<T>& call, index pass, index concurrency)
        : call_(call), pass_(pass), queries_(call.in.queries.shape()), kv_heads_(call.in.keys.shape().heads) {
        const auto group = queries_.heads / kv_heads_;
        if (call.pattern.steps_alike()) heads_together_ = std::clamp<index>(traits::max_rows / queries_.tokens, 1, group);
        places_of_group_ = (group + heads_together_ - 1) / heads_together_;
        const auto places_of_batch = kv_heads_ * places_of_group_, all_places = queries_.batch * places_of_batch;
        if (call.pattern.heads_alike() && has_masks_to_share()) {
            blocks_together_ = max_blocks;
            const auto parts = parts_of(0);
            const auto least = concurrency == 1 ? 1 : 4 * concurrency; // fewer tasks would leave threads without work
            places_together_ = std::clamp<index>(all_places * parts / least, 1, places_of_batch);
            if (all_places * parts < least) blocks_together_ = 1;
        }
        for (index place = 0; place < all_places; place += call.pattern.steps_alike() ? places_of_batch : 1)
            parts_ = std::max(parts_, parts_of(place));
        groups_ = (places_of_batch + places_together_ - 1) / places_together_;
    }

    index count() const { return queries_.batch * groups_ * parts_; }
    /// The places first .. end - 1 of a task.
    std::pair<index, index> places(index task) const {
        const auto of_batch = kv_heads_ * places_of_group_, group = task / parts_ % groups_, first = task / parts_ / groups_ * of_batch;
        return {first + group * places_together_, first + std::min((group + 1) * places_together_, of_batch)};
    }
    /// A query block: some tokens of a place.
    query_block block_at(index place, const query_tile& tokens) const {
        auto block = heads_at(place);
        block.tokens = tokens;
        block.first_row = tokens.first - call_.in.positions.first_query[block.batch];
        return block;
    }
    /// Spans of keys that a query block may have to do with.
    index spans() const {
        const auto blocks = call_.blocks_of(block_at(0, tokens_at(0, 0, std::max<index>(1, step_of_place(0)))));
        return floor_div(blocks.end_block() - 1, visible_span::max_blocks) - floor_div(blocks.first_block(), visible_span::max_blocks) + 1;
    }

    /// The query blocks of a task for its first place: those of the grid, or of what lies between the nearest cuts of the pattern, which
    /// further cuts divide.
    class walk {
    public:
        walk(const task_grid& grid, index task)
            : grid_(grid), place_(grid.places(task).first), step_(grid.step_of_place(place_)),
              number_(task % grid.parts_ * grid.blocks_in_part(step_)), end_(std::min(number_ + grid.blocks_in_part(step_), grid.blocks(step_))) {}

        /// Some more of them; how many there are.
        index next(query_tile (&tiles)[std::size_t{max_blocks}]) {
            index count = 0;
            for (; count < max_blocks; ++count) {
                if (left_.count == 0 && !fill()) break;
                const auto size = is_cut() && left_.count > traits::max_rows ? first_of(left_) : left_.count;
                tiles[count] = left_.part(0, size);
                left_ = left_.part(size, left_.count);
            }
            return count;
        }

    private:
        bool is_cut() const { return step_ == 1 && grid_.heads_together_ == 1 && grid_.queries_.tokens > traits::lane_count; }
        index cut(index query) const {
            const auto heads = grid_.heads_at(place_);
            return grid_.call_.pattern.cut(heads.batch, heads.first_head, grid_.pass_, query, traits::max_rows);
        }
        /// The next block of the grid, moved to cuts.
        bool fill() {
            for (; number_ < end_ && left_.count == 0; ++number_) {
                left_ = grid_.tokens_at(place_, number_, step_);
                if (!is_cut()) continue;
                const auto first = number_ == 0 ? left_.first : begin_after(grid_.tokens_at(place_, number_ - 1, step_));
                const auto end = number_ + 1 == grid_.blocks(step_) ? left_.first + left_.count : begin_after(left_);
                left_ = {first, end - first, 1};
            }
            return left_.count > 0;
        }
        /// Where the blocks after one of the grid's begin: at the nearest cut, but never before that one.
        index begin_after(const query_tile& block) const { return std::max(cut(block.first + block.count), block.first); }
        index first_of(const query_tile& queries) const {
            const auto found = cut(queries.first + traits::max_rows) - queries.first;
            return found > 0 ? found : traits::usual_registers * traits::lane_count;
        }

        const task_grid& grid_;
        index place_, step_, number_, end_;
        query_tile left_{};
    };

private:
    using traits = query_block_traits<T, Arch>;

    query_block heads_at(index place) const {
        const auto group = queries_.heads / kv_heads_, within = place % places_of_group_ * heads_together_;
        const auto kv_head = place / places_of_group_ % kv_heads_;
        return {.batch = place / places_of_group_ / kv_heads_,
                .first_head = kv_head * group + within,
                .heads = std::min(heads_together_, group - within),
                .kv_head = kv_head};
    }
    index step_of_place(index place) const {
        const auto heads = heads_at(place);
        return call_.pattern.step(heads.batch, heads.first_head, pass_);
    }
    index max_tokens(index step) const {
        return heads_together_ > 1 ? queries_.tokens : traits::rows_of((queries_.tokens + step - 1) / step);
    }
    index blocks(index step) const { return step == 0 ? 0 : tile_count(queries_.tokens, max_tokens(step), step); }
    query_tile tokens_at(index place, index number, index step) const {
        return tile_at(number, call_.in.positions.first_query[heads_at(place).batch], queries_.tokens, max_tokens(step), step,
                       heads_together_ > 1 ? 0 : traits::lane_count);
    }
    /// Blocks of one residue class follow each other, for which its keys are copied once.
    index blocks_in_part(index step) const {
        if (step <= 1) return blocks_together_;
        return std::clamp<index>(tile_count(queries_.tokens / step, max_tokens(step)), 1, 256 / max_tokens(step) + 1);
    }
    index parts_of(index place) const {
        const auto step = step_of_place(place);
        return (blocks(step) + blocks_in_part(step) - 1) / blocks_in_part(step);
    }
    /// If a query block in the middle needs masks for a few key blocks: those of one span are kept, and heads one after the other read keys
    /// again that one head after the other would find in the cache.
    bool has_masks_to_share() const {
        const auto step = step_of_place(0);
        if (step == 0) return false;
        const auto block = block_at(0, tokens_at(0, blocks(step) / 2, step));
        const auto keys = call_.blocks_of(block);
        constexpr index few = visible_span::max_blocks / 2;
        index seen = 0, masked = 0;
        for (auto at = keys.first_block(); at < keys.end_block() && seen <= few; ++at) {
            const auto pairs = call_.pattern.of_box(block, pass_, keys.run(at, at + 1).positions());
            seen += !pairs.is_none();
            masked += !pairs.is_none() && !pairs.is_all();
        }
        return masked > 0 && seen <= few;
    }

    const softmax_call<T>& call_;
    index pass_;
    shape queries_;
    index kv_heads_, heads_together_ = 1, places_of_group_ = 1, blocks_together_ = 1, places_together_ = 1, parts_ = 0, groups_ = 1;
};

} // namespace attn::kernel
