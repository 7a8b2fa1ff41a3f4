// One panel of queries of talking-heads attention: which keys it sees, and what becomes of their scores.
#pragma once

#include "../softmax/score_adjustment.hpp"
#include "../softmax/visible_keys.hpp"
#include "tile.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a call is made of, as in talking_heads_attention.
template <Scalar T>
struct talking_heads_call {
    const visible_keys* pattern;           ///< none where only memory is counted
    const score_adjustment<T>* adjustment; ///< likewise, or where scores stay as they are
    bool differs_by_head;                  ///< of the pattern
    bool scored;
    double scale;
    std::span<const double> sinks;
    tensor_view<const double> logits_mix;
    std::span<const double> logits_bias;
    tensor_view<const double> weights_mix;
    std::span<const double> weights_bias;
};

/// One thread's work on one panel of queries.
template <Scalar T, class Arch>
class talking_heads_panel {
public:
    using tile_type = talking_heads_tile<T, Arch>;

    talking_heads_panel(const talking_heads_call<T>& call, detail::scratch& memory, const talking_heads_shape& s,
                        const talking_heads_mixings<T, Arch>& mixings, bool roomy)
        : call_(call), shape_(s), mixings_(mixings), keeps_(roomy && s.mixes_weights), tile_(memory, s, keeps_),
          visible_(memory.take<std::uint64_t>((call.differs_by_head ? s.heads : 1) * tile_.block_keys())),
          scratch_(memory.take<T>(call.scored ? tile_.block_keys() * tile_type::most_queries : 0)) {}

    /// 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden key; and sums of large values may pass what numbers hold
    /// before they are divided. If one is not finite, all is done again with every hidden key left out, and then with smaller weights.
    void run(const inputs<T>& in, const outputs<T>& out, index batch, const query_tile& queries) {
        rows_ = {.batch = batch, .first_head = 0, .heads = shape_.heads, .tokens = queries, .first_row = queries.first - in.positions.first_query[batch]};
        blocks_ = {tile_type::memory_type::keys_of_block, in.positions.first_key[batch], shape_.keys, queries};
        tile_.begin(queries, in, out, batch, static_cast<T>(call_.scale));
        constexpr T small = std::same_as<T, float> ? 0x1p-40 : 0x1p-80;
        const int attempts = shape_.mixes_weights ? 2 : 3; // mixed weights have been divided
        for (int attempt = 0; attempt < attempts; ++attempt) {
            careful_ = attempt > 0;
            unit_ = attempt == 2 ? small : T{1};
            tile_.reset_states();
            tile_.reset_values();
            const auto blocks = for_each_block([&](weight_block<T> block, index) {
                compute_weights(block);
                if (!shape_.mixes_weights) tile_.add_values(block, mixings_, careful_, shape_.keys);
            });
            finish_states(in, out);
            if (shape_.mixes_weights) {
                for_each_block([&](weight_block<T> block, index number) {
                    if (keeps_)
                        leave_out_last(block);
                    else
                        compute_weights(block);
                    tile_.add_values(block, mixings_, careful_, blocks - 1 - number);
                });
            }
            if (write_values(in, out)) break;
        }
    }

private:
    using lanes = simd::lanes<T, Arch>;

    /// Calls f(block, number) for the blocks of keys that any head sees; how many they are.
    template <class F>
    index for_each_block(F&& f) {
        index number = 0;
        for_each_visible_block(*call_.pattern, rows_, visible_keys::whole, blocks_, blocks_.first_block(), blocks_.end_block(), [&](visible_block block) {
            auto keys = blocks_.run(block.number, block.number + 1);
            keys.full = block.all;
            f(tile_.block(number, keys, block.all && !looks_at_scores()), number);
            ++number;
        });
        return number;
    }
    /// The first pass is over.
    void finish_states(const inputs<T>& in, const outputs<T>& out) {
        const auto& queries = tile_.queries();
        tile_.finish_states([&](index c) {
            return call_.sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(call_.sinks[static_cast<std::size_t>(c)]);
        }, unit_);
        const auto row = queries.first - in.positions.first_query[tile_.batch()];
        if (out.log_sum_exp.data())
            for (index c = 0; c < shape_.heads; ++c)
                for (index q = 0; q < queries.count; ++q)
                    out.log_sum_exp(tile_.batch(), c, row + q * queries.step, 0) =
                        softmax_merge<T, Arch>::log_sum_exp(tile_.state(c).maximum[q], tile_.state(c).sum[q]);
        if (shape_.mixes_weights && !keeps_) tile_.reset_states();
    }
    /// Writes head by head what is still in the caches from the look at it; whether all of it is finite.
    bool write_values(const inputs<T>& in, const outputs<T>& out) {
        const auto& queries = tile_.queries();
        const auto row = queries.first - in.positions.first_query[tile_.batch()];
        bool finite = true;
        tile_.finish_values();
        for (index e = 0; e < shape_.value_heads; ++e) {
            finite = finite && tile_.has_finite_values(e);
            for (index q = 0; q < queries.count; ++q) {
                const auto to = row_of(out.values, tile_.batch(), e, row + q * queries.step);
                if (unit_ != 1 && is_finite(to)) continue; // it is right already, and smaller weights might cost it bits
                write_row<false, T, Arch>(tile_.values(e, q), shape_.value_channels, tile_.factor(e, q), T{0}, to.data, to.channel_stride);
            }
        }
        return finite;
    }
    /// Whether a score of -infinity must be told from a low one: where values of hidden keys are left out, or get no bias.
    bool looks_at_scores() const { return careful_ || !call_.weights_bias.empty(); }

    static row_block<T> row_of(const tensor_view<T>& tensor, index batch, index head, index token) { return rows_of(tensor, batch, head, token); }
    bool is_finite(const row_block<T>& row) const {
        for (index c = 0; c < shape_.value_channels; ++c)
            if (!std::isfinite(row.data[c * row.channel_stride])) return false;
        return true;
    }

    void compute_weights(weight_block<T>& block) {
        if (!block.all_seen) find_visible(block);
        leave_out_last(block);
        tile_.multiply_keys(block, mixings_.logits);
        for (index c = 0; c < shape_.heads; ++c) adjust_scores(block, c);
        if (looks_at_scores()) tile_.find_seen(block);
        tile_.push_scores(block, unit_);
    }
    /// Of a block that is not all seen, the keys behind the last that any query sees.
    static void leave_out_last(weight_block<T>& block) {
        if (block.all_seen) return;
        while (block.keys.count > 1 && block.seen[block.keys.count - 1] == 0) --block.keys.count;
    }
    /// One bit per query and key, by head if the pattern differs, and for any head.
    void find_visible(const weight_block<T>& block) {
        std::fill_n(block.seen, block.keys.count, block.keys.full ? bit_range(0, tile_.queries().count) : 0);
        if (block.keys.full) return;
        for (index c = 0; c < (call_.differs_by_head ? shape_.heads : 1); ++c) {
            call_.pattern->find(rows_of_head(c), visible_keys::whole, block.keys, visible(c));
            for (index j = 0; j < block.keys.count; ++j) block.seen[j] |= visible(c)[j];
        }
    }
    std::uint64_t* visible(index head) const { return visible_ + (call_.differs_by_head ? head * tile_.block_keys() : 0); }
    query_block rows_of_head(index head) const {
        auto rows = rows_;
        rows.first_head = head;
        rows.heads = 1;
        return rows;
    }

    /// The score function of one head, and the mask of its pattern.
    void adjust_scores(const weight_block<T>& block, index head) {
        T* const scores = tile_.weights(block, head);
        if (call_.adjustment) (*call_.adjustment)({rows_of_head(head), block.keys, scores, tile_.stride(), scratch_});
        if (!block.keys.full) hide_scores<T, Arch>(scores, block.keys.count, tile_.stride(), visible(head));
    }

    const talking_heads_call<T>& call_;
    const talking_heads_shape& shape_;
    const talking_heads_mixings<T, Arch>& mixings_;
    bool keeps_, careful_ = false;
    T unit_ = 1;
    tile_type tile_;
    std::uint64_t* visible_;
    T* scratch_;
    query_block rows_{};
    key_blocks blocks_{0, 0, 0, {0, 0, 1}};
};

} // namespace attn::kernel
