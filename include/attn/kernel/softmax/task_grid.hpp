// The tasks of a call of softmax attention: which query blocks belong together, and in which order they come.
#pragma once

#include "mainloop.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The query blocks of one pass, by its shape and pattern alone: a place is a head, or some that share a block; the tokens of a place are
/// cut into blocks of even size. A task is a part of these for one place; or for all heads that see the same, so that a mask is made once.
template <Scalar T, class E = T>
class task_grid {
public:
    task_grid(const softmax_call<T>& call, index_t pass, index_t concurrency)
        : call_(call), pass_(pass), queries_(call.in.queries.shape()), kv_heads_(call.in.keys.shape().heads) {
        const auto group = queries_.heads / kv_heads_;
        const auto heads_of = [&](index_t tokens) { return std::clamp<index_t>(traits::max_rows / tokens, 1, group); };
        if (call.pattern.steps_alike()) packed_heads_ = heads_of(queries_.tokens);
        if (const auto alike = call.pattern.queries_alike(); alike < std::min(queries_.tokens, traits::rows_of(queries_.tokens))) {
            const auto heads = call.pattern.heads_alike() ? heads_of(alike) : 1;
            if (sees_apart(alike * heads)) {
                tokens_together_ = alike;
                packed_heads_ = heads;
            }
        }
        places_of_group_ = (group + packed_heads_ - 1) / packed_heads_;
        places_of_batch_ = kv_heads_ * places_of_group_;
        const auto places = queries_.batch * places_of_batch_;
        if (call.pattern.heads_alike() && has_masks_to_share()) {
            blocks_together_ = kept_masks;
            const auto parts = parts_of(0);
            const auto target = concurrency == 1 ? 1 : 4 * concurrency; // fewer tasks would leave threads without work
            places_together_ = std::clamp<index_t>(places * parts / target, 1, places_of_batch_);
            if (places * parts < target) blocks_together_ = 1;
        }
        for (index_t place = 0; place < places; place += call.pattern.steps_alike() ? places_of_batch_ : 1)
            parts_ = std::max(parts_, parts_of(place));
        groups_ = (places_of_batch_ + places_together_ - 1) / places_together_;
    }

    index_t count() const { return queries_.batch * groups_ * parts_; }
    /// Spans of keys that a query block may have to do with.
    index_t spans() const {
        const auto blocks = call_.blocks_of({.tokens = tokens_at(0, 0, std::max<index_t>(1, step_of_place(0)))});
        return floor_div(blocks.end_block() - 1, visible_span::max_blocks) - floor_div(blocks.first_block(), visible_span::max_blocks) + 1;
    }

    /// The query blocks of some tasks, one after the other. Those of a task are, for its first place, those of the grid, or of what lies
    /// between the nearest cuts of the pattern, which further cuts divide; its other places have the same.
    class walk {
    public:
        walk(const task_grid& grid, index_t first_task, index_t end_task)
            : grid_(grid), tasks_(end_task - first_task), part_(first_task % std::max<index_t>(1, grid.parts_)) {
            const auto group = first_task / std::max<index_t>(1, grid.parts_);
            group_ = group % grid.groups_;
            batch_ = group / grid.groups_;
        }

        /// The next block. False if there is none.
        bool next(query_block& block) {
            if (++number_ >= count_) {
                number_ = 0;
                if (++place_ < end_place_) heads_ = grid_.heads_at(place_);
                else if (!next_tiles()) return false;
            }
            block = heads_;
            block.tokens = tiles_[number_];
            block.first_row = block.tokens.first - grid_.call_.in.positions.first_query[block.batch];
            block.masks = number_;
            block.shares_masks = place_ != first_place_;
            return true;
        }

    private:
        /// Takes some more tokens, for all places of the task.
        bool next_tiles() {
            for (count_ = 0; count_ < kept_masks;) {
                if (left_.count > 0 || fill()) {
                    const auto size = is_cut() && left_.count > traits::max_rows ? first_of(left_) : left_.count;
                    tiles_[count_++] = left_.part(0, size);
                    left_ = left_.part(size, left_.count);
                } else if (count_ > 0) {
                    break;
                } else if (tasks_ > 0) {
                    begin_task();
                } else {
                    return false;
                }
            }
            place_ = first_place_;
            heads_ = first_heads_;
            return true;
        }
        /// Begins the next task: tasks are counted, parts first, then groups of places, then batch entries.
        void begin_task() {
            first_place_ = batch_ * grid_.places_of_batch_ + group_ * grid_.places_together_;
            end_place_ = std::min(first_place_ + grid_.places_together_, (batch_ + 1) * grid_.places_of_batch_);
            first_heads_ = grid_.heads_at(first_place_);
            step_ = grid_.step_of(first_heads_);
            all_blocks_ = grid_.blocks(step_);
            block_ = std::min(part_ * grid_.blocks_together_, all_blocks_);
            end_block_ = std::min(block_ + grid_.blocks_together_, all_blocks_);
            if (is_cut() && block_ < end_block_) border_ = block_ == 0 ? tokens_at(0).first : border_after(tokens_at(block_ - 1));
            --tasks_;
            if (++part_ == grid_.parts_) part_ = 0, ++group_;
            if (group_ == grid_.groups_) group_ = 0, ++batch_;
        }
        /// The next block of the grid, its borders moved to cuts.
        bool fill() {
            while (block_ < end_block_ && left_.count == 0) {
                left_ = tokens_at(block_++);
                if (!is_cut()) break;
                const auto end = block_ == all_blocks_ ? left_.first + left_.count : border_after(left_);
                left_ = {border_, end - border_, 1};
                border_ = end;
            }
            return left_.count > 0;
        }
        bool is_cut() const {
            return step_ == 1 && grid_.packed_heads_ == 1 && grid_.tokens_together_ == 0 && grid_.queries_.tokens > traits::lane_count;
        }
        index_t cut(index_t query) const {
            return grid_.call_.pattern.cut(first_heads_.batch, first_heads_.first_head, grid_.pass_, query, traits::max_rows);
        }
        query_tile tokens_at(index_t block) const { return grid_.tokens_at(first_heads_.batch, block, step_); }
        /// The border behind a block: at the nearest cut, but never before the block itself.
        index_t border_after(const query_tile& block) const { return std::max(cut(block.first + block.count), block.first); }
        index_t first_of(const query_tile& queries) const {
            const auto found = cut(queries.first + traits::max_rows) - queries.first;
            return found > 0 ? found : traits::usual_registers * traits::lane_count;
        }

        const task_grid& grid_;
        index_t tasks_, part_, group_, batch_;                          ///< that are left, and what the next of them is
        index_t first_place_ = 0, end_place_ = 0, place_ = 0;           ///< of the task
        index_t step_ = 0, block_ = 0, end_block_ = 0, all_blocks_ = 0; ///< of the grid
        index_t border_ = 0;                                            ///< where the next of them begins
        query_tile left_{};                                             ///< of the last
        query_tile tiles_[std::size_t{kept_masks}];
        index_t number_ = 0, count_ = 0;  ///< of the tiles
        query_block first_heads_, heads_; ///< of the task's first place, and of the one that comes now
    };

private:
    using traits = query_block_traits<T, E>;

    query_block heads_at(index_t place) const {
        const auto group = queries_.heads / kv_heads_, within = place % places_of_group_ * packed_heads_;
        const auto kv_head = place / places_of_group_ % kv_heads_;
        return {.batch = place / places_of_batch_,
                .first_head = kv_head * group + within,
                .heads = std::min(packed_heads_, group - within),
                .kv_head = kv_head};
    }
    index_t step_of(const query_block& heads) const { return call_.pattern.step(heads.batch, heads.first_head, pass_); }
    index_t step_of_place(index_t place) const { return step_of(heads_at(place)); }
    index_t max_tokens(index_t step) const {
        if (tokens_together_ > 0) return tokens_together_;
        return packed_heads_ > 1 ? queries_.tokens : traits::rows_of((queries_.tokens + step - 1) / step);
    }
    index_t blocks(index_t step) const { return step == 0 ? 0 : tile_count(queries_.tokens, max_tokens(step), step); }
    query_tile tokens_at(index_t batch, index_t number, index_t step) const {
        return tile_at(number, call_.in.positions.first_query[batch], queries_.tokens, max_tokens(step), step,
                       packed_heads_ > 1 || tokens_together_ > 0 ? 0 : traits::lane_count);
    }
    index_t parts_of(index_t place) const { return (blocks(step_of_place(place)) + blocks_together_ - 1) / blocks_together_; }
    /// Whether there are masks for heads to share: if a query block in the middle needs masks for a few key blocks, those of one span are
    /// kept, and heads one after the other read keys again that one head after the other would find in the cache.
    bool has_masks_to_share() const {
        const auto step = step_of_place(0);
        if (step == 0) return false;
        const query_block block{.tokens = tokens_at(0, blocks(step) / 2, step)};
        const auto keys = call_.blocks_of(block);
        constexpr index_t few = visible_span::max_blocks / 2;
        index_t seen = 0, masked = 0;
        const auto next = [&](index_t from) { return first_visible_block(call_.pattern, block, pass_, keys, from, keys.end_block()); };
        for (auto at = next(keys.first_block()); at < keys.end_block() && seen <= few; at = next(at + 1)) {
            ++seen;
            masked += !call_.pattern.of_box(block, pass_, keys.run(at, at + 1).positions()).is_all();
        }
        return masked > 0 && seen <= few;
    }

    /// Whether query blocks of so many rows that see about the same keys take less time than full ones, for which keys count that one of
    /// their rows sees, in the middle of the call. To find a key and to copy it takes the time of some thousand multiply-adds.
    bool sees_apart(index_t rows) const {
        const auto step = step_of_place(0);
        if (step == 0) return false;
        const auto more_rows = 8192 / std::max<index_t>(1, call_.in.keys.shape().channels + call_.in.values.shape().channels);
        const query_block block{.tokens = tokens_at(0, blocks(step) / 2, step)};
        const auto keys = call_.blocks_of(block);
        std::uint64_t bits[softmax_call<T>::block_keys];
        index_t pairs = 0, seen = 0;
        for_each_visible_block(call_.pattern, block, pass_, keys, keys.first_block(), keys.end_block(), [&](const key_run& all) {
            const auto run = visible_run_of(call_.pattern, block, pass_, all, bits);
            for (index_t j = 0; j < run.count; ++j) {
                const auto of_key = run.rows ? run.rows[j] : bit_range(0, block.rows());
                pairs += std::popcount(of_key);
                seen += of_key != 0;
            }
        });
        return seen * block.rows() * rows > pairs * (rows + more_rows);
    }

    const softmax_call<T>& call_;
    index_t pass_;
    shape queries_;
    index_t tokens_together_ = 0; ///< the most of a block; 0: what its rows allow
    index_t kv_heads_, packed_heads_ = 1, places_of_group_ = 1, places_of_batch_ = 1;
    index_t blocks_together_ = 1, places_together_ = 1, parts_ = 0, groups_ = 1;
};

} // namespace attn::kernel
