// A panel of queries: its tiles of scores, one after the other, as a pattern and a score function would have them.
#pragma once

#include "../pattern/narrowed.hpp"
#include "score_tile.hpp"
#include "softmax_tile.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Walks the key runs that a pattern shows to one panel of queries.
template <Scalar T, class Arch, ScoreFunction S>
class softmax_panel {
public:
    using tile_type = softmax_tile<T, Arch>;
    using keys_type = tile_keys<T, Arch>;
    using lanes = simd::lanes<T, Arch>;
    using score_type = score_tile<T, Arch, S>;
    static constexpr bool scored = !std::same_as<S, identity_score>, adds = std::derived_from<score_type, added_scores<T, Arch>>;
    static constexpr bool keeps_bias = requires { score_type::most_kept_keys; };

    /// kept_keys: of how many keys a bias is kept for the head that follows.
    softmax_panel(detail::scratch& memory, index key_channels, index value_channels, const S& score, index kept_keys)
        : tile_(memory, key_channels, value_channels), score_(score_type::take(memory, score, std::max(keys_type::most, kept_keys),
                                                                               adds ? tile_type::most_queries : tile_type::lane_count)),
          no_sums_(value_channels == 0) {}

    /// Goes on with another batch entry or head.
    void rebind(const S& score) { score_.emplace(score_->rebound(score)); }

    /// The softmax of a panel that has begun, over all keys that the pattern shows it. With `results` and if it sees a key it is ended with
    /// the sink and written to them: then the answer is true. 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden
    /// key: if a sum is not finite, the panel is done again with every hidden key left out; and if it is not finite even so, with smaller
    /// weights, in case only the sum is too large for a number. Where no sum could tell, all is done with care at once.
    bool run(const Pattern auto& pattern, index first_key, index keys, const row_block<T>& results, T sink) {
        score_->begin(tile_.queries(), first_key, keys);
        end_key_ = first_key + keys;
        bool smaller = false;
        for (careful_ = adds && no_sums_;; careful_ = true) {
            index end = first_key + keys;
            for_each_run(pattern, tile_.queries(), first_key, keys, tile_type::grain, [&](const key_run& run) {
                end = run.first + run.count * run.step;
                append(pattern, run);
            });
            if (tile_.keys().rows() == 0) {
                tile_.push_nothing();
                return false;
            }
            if (!careful_) tile_.fetch_beyond(end);
            multiply();
            if (tile_.push_last(careful_, results, sink) || smaller) return results.data != nullptr;
            smaller = careful_;
            if (smaller)
                tile_.begin_smaller(keys);
            else
                tile_.begin_again();
        }
    }
    tile_type& tile() { return tile_; }

private:
    /// Cuts a run into segments, as evenly as they come so that no tile is left with a few keys, and pushes each full tile.
    void append(const Pattern auto& pattern, key_run run) {
        while (run.count > 0) {
            if (tile_.keys().full()) push();
            auto piece = run;
            const auto rows = tile_.keys().rows();
            if (rows + run.count > keys_type::most) {
                const auto tiles = (rows + run.count + keys_type::good - 1) / keys_type::good;
                const auto even = ((rows + run.count + tiles - 1) / tiles + tile_type::grain - 1) / tile_type::grain * tile_type::grain;
                if (even <= rows) {
                    push();
                    continue;
                }
                piece.count = std::min(even - rows, run.count);
            }
            const auto& segment = tile_.keys().add(piece);
            if (!piece.full) find_visible(pattern, segment);
            run.first += piece.count * run.step;
            run.count -= piece.count;
            if (run.count > 0) push();
        }
    }
    void push() {
        if (tile_.keys().rows() == 0) return;
        multiply();
        tile_.push(careful_);
    }
    /// The weights of the tile.
    void multiply() {
        for (const auto& segment : tile_.keys().segments()) {
            if constexpr (adds) {
                score_->load(tile_.queries(), segment.keys);
                fetch_next_bias(segment.keys);
            }
            multiply(segment);
        }
        tile_.weigh_scores(careful_);
    }
    /// What is added to the scores of the segment's keys.
    auto added() const {
        if constexpr (adds)
            return static_cast<const added_scores<T, Arch>&>(*score_);
        else
            return no_scores{};
    }
    /// The scores of a segment's keys, which raise the maxima.
    void multiply(const key_segment<T>& segment) {
        // -infinity + NaN is NaN: what hides a key does not ask what it holds.
        const bool adjusts = !segment.keys.full || (adds ? careful_ : scored);
        tile_.multiply_keys(segment, added(), !adjusts);
        if (!adjusts) return;
        adjust_scores(segment);
        if (tile_.has_lone_query()) adjust_lone_scores(segment);
    }
    /// A bias lies in as many streams as the panel has queries: nothing but this foresees them.
    void fetch_next_bias(key_run keys) {
        if constexpr (keeps_bias && requires {
                          { score_->rows(tile_.queries(), keys) } -> std::same_as<row_block<const T>>;
                      }) {
            keys.first += keys.count * keys.step;
            keys.count = std::min(keys.count, (end_key_ - keys.first + keys.step - 1) / keys.step);
            if (keys.count > 0 && score_->needs(keys))
                tile_.fetch_for_next_tile(score_->rows(tile_.queries(), keys), tile_.queries().count, keys.count);
        }
    }
    /// One bit per query and key of a segment that is partly visible.
    [[gnu::noinline]] void find_visible(const Pattern auto& pattern, const key_segment<T>& segment) {
        const auto queries = tile_.all_queries();
        const auto present = simd::lane_bits::first(queries.count);
        const auto here = narrowed(pattern, tile_.queries().positions(), segment.keys.positions());
        for (index j = 0; j < segment.keys.count; ++j) // a pattern may answer with one bool for all queries
            tile_.visible(segment.first_row + j) = (present && here.visible(queries, segment.keys.first + j * segment.keys.step)).value;
    }
    /// Applies the score function, takes hidden keys out of the way, and raises the maxima.
    [[gnu::noinline]] void adjust_scores(const key_segment<T>& segment) {
        const bool full = segment.keys.full;
        const index keys = segment.keys.count, first_key = segment.keys.first, step = segment.keys.step, stride = tile_.stride();
        const std::uint64_t* const visible = &tile_.visible(segment.first_row);
        const auto& softmax = tile_.softmax();
        for (index reg = 0; reg < tile_.registers(); ++reg) {
            const auto lane = reg * tile_type::lane_count;
            // A copy that nobody else can see: scores are stored in each turn, and what they might overlap would be read and broadcast
            // anew.
            const auto score = score_of(lane, segment.keys);
            const auto queries = tile_.queries_of(reg);
            auto top = lanes::load(softmax.next_maximum + lane);
            // Not the rows before the first that the register sees. Those after the last it may yet see a later segment of.
            const auto& seen = tile_.seen_rows(reg);
            const auto begin = seen.last == 0 ? keys : std::clamp<index>(seen.first - segment.first_row, 0, keys);
            T* scores = tile_.scores(segment.first_row + begin, reg);
            for (index j = begin; j < keys; ++j, scores += stride) {
                auto x = adjusted(score, lanes::load(scores), queries, first_key + j * step, j);
                if (!full) x = select(simd::lane_bits{visible[j] >> lane}, x, lanes(hidden_score<T>));
                top = max_or_second(x, top);
                x.store(scores);
            }
            top.store(softmax.next_maximum + lane);
        }
    }

    /// The same for the lone query, a number at a time.
    [[gnu::noinline]] void adjust_lone_scores(const key_segment<T>& segment) {
        const auto lane = tile_.stride();
        const auto score = score_of(lane, segment.keys);
        const auto queries = tile_.queries_of(tile_.registers());
        T* const scores = tile_.lone_scores(segment.first_row);
        for (index j = 0; j < segment.keys.count; ++j) {
            if (!segment.keys.full && !(tile_.visible(segment.first_row + j) & query_bits(lane, 1)))
                scores[j] = hidden_score<T>;
            else if constexpr (scored)
                adjusted(score, scores[j], queries, segment.keys.first + j * segment.keys.step, j).store_first(scores + j, 1);
        }
    }
    /// What one register of queries, or the lone query, has been or is to be scored with: `keys` are those of the segment at hand.
    auto score_of(index lane, const key_run& keys) {
        if constexpr (adds) {
            return lane == tile_.stride() ? added().of_lone_query() : added().from(0, lane);
        } else {
            score_->load(tile_.queries().part(lane, std::min(tile_type::lane_count, tile_.queries().count - lane)), keys);
            return *score_;
        }
    }
    /// What the score function makes of scores with one key, the row-th of its run.
    [[gnu::always_inline]] lanes adjusted(const auto& score, lanes x, const auto& queries, index key, index row) const {
        if constexpr (adds)
            return careful_ ? score.hide(x, row) : x; // it has been added
        else if constexpr (scored)
            return score(x, queries, key, row);
        else
            return x;
    }

    tile_type tile_;
    std::optional<score_type> score_; // score functions can be copied, but need not be assignable
    index end_key_ = 0;
    bool no_sums_, careful_ = false;
};

} // namespace attn::kernel
