// One panel of queries of talking-heads attention: which keys it sees, and what becomes of their scores.
#pragma once

#include "../pattern/narrowed.hpp"
#include "../pattern/over_heads.hpp"
#include "score_tile.hpp"
#include "talking_heads_tile.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a call is made of, as in talking_heads_attention.
template <Pattern P, ScoreFunction S>
struct talking_heads_call {
    const P& pattern;
    const S& score;
    double scale;
    std::span<const double> sinks;
    tensor_view<const double> logits_mix;
    std::span<const double> logits_bias;
    tensor_view<const double> weights_mix;
    std::span<const double> weights_bias;
};

/// One thread's work on one panel of queries.
template <Scalar T, class Arch, Pattern P, ScoreFunction S>
class talking_heads_panel {
public:
    using tile_type = talking_heads_tile<T, Arch>;
    using bound_score = decltype(score_at(std::declval<const S&>(), 0, 0));
    static constexpr bool scored = !std::same_as<bound_score, identity_score>;

    talking_heads_panel(const talking_heads_call<P, S>& call, detail::scratch& memory, const talking_heads_shape& s,
                        const talking_heads_mixings<T, Arch>& mixings, bool roomy)
        : call_(call), shape_(s), mixings_(mixings), keeps_(roomy && s.mixes_weights), tile_(memory, s, keeps_),
          visible_(memory.take<std::uint64_t>((differs_by_head ? s.heads : 1) * tile_.block_keys())) {
        detail::scratch sizes;
        if (s.heads > 0) score_type::take(sizes, score_at(call.score, 0, 0), tile_.block_keys(), tile_type::lane_count);
        score_memory_ = memory.take<std::byte>(static_cast<index>(sizes.used_bytes()));
    }

    /// 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden key: if a sum is not finite, all is done again with
    /// every hidden key left out; and if it is not finite even so, with smaller weights, in case only the sum is too large for a number.
    void run(const inputs<T>& in, const outputs<T>& out, index batch, const query_tile& queries) {
        first_key_ = in.positions.first_key[batch];
        tile_.begin(queries, in, out, batch, static_cast<T>(call_.scale));
        bool smaller = false;
        for (careful_ = false;; careful_ = true) {
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
            if (write_values(in, out) || smaller) break;
            if (careful_ && !(smaller = tile_.grow_infinite_values(shape_.keys))) break;
        }
    }

private:
    using score_type = score_tile<T, Arch, bound_score>;
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool differs_by_head = attn::detail::HasAt<P>;

    /// Calls f(block, number) for the blocks of keys that any head sees; how many they are.
    template <class F>
    index for_each_block(F&& f) {
        const attn::detail::over_heads<P> any_head{call_.pattern, tile_.batch(), shape_.heads};
        const auto most = tile_.block_keys();
        index number = 0;
        for_each_run(any_head, tile_.queries(), first_key_, shape_.keys, most, [&](key_run run) {
            for (; run.count > 0; run.first += most * run.step, run.count -= most, ++number) {
                auto keys = run;
                keys.count = std::min(most, run.count);
                f(tile_.block(number, keys, keys.full && !looks_at_scores()), number);
            }
        });
        return number;
    }
    /// The first pass is over.
    void finish_states(const inputs<T>& in, const outputs<T>& out) {
        const auto& queries = tile_.queries();
        tile_.finish_states([&](index c) {
            return call_.sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(call_.sinks[static_cast<std::size_t>(c)]);
        });
        const auto row = queries.first - in.positions.first_query[tile_.batch()];
        if (out.log_sum_exp.data())
            for (index c = 0; c < shape_.heads; ++c)
                for (index q = 0; q < queries.count; ++q)
                    out.log_sum_exp(tile_.batch(), c, row + q * queries.step, 0) = tile_.state(c).log_sum_exp(q);
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
            for (index q = 0; q < queries.count; ++q)
                write_row<false, T, Arch>(tile_.values(e, q), shape_.value_channels, tile_.factor(e, q), T{0},
                                          out.values.row(tile_.batch(), e, row + q * queries.step), out.values.strides().channel);
        }
        return finite;
    }
    /// Whether a score of -infinity must be told from a low one: where values of hidden keys are left out, or get no bias.
    bool looks_at_scores() const { return careful_ || !call_.weights_bias.empty(); }

    void compute_weights(weight_block<T>& block) {
        const bool adjusted = scored || !block.keys.full, raised = shape_.mixes_logits && block.all_seen && !adjusted;
        if (!block.all_seen) find_visible(block);
        leave_out_last(block);
        tile_.multiply_keys(block, mixings_.logits, raised);
        if (adjusted)
            for (index c = 0; c < shape_.heads; ++c) adjust_scores(block, c);
        if (looks_at_scores()) tile_.find_seen(block);
        tile_.push_scores(block, raised);
    }
    /// Of a block that is not all seen, the keys behind the last that any query sees.
    static void leave_out_last(weight_block<T>& block) {
        if (block.all_seen) return;
        while (block.keys.count > 1 && block.seen[block.keys.count - 1] == 0) --block.keys.count;
    }
    /// One bit per query and key, by head if the pattern differs, and for any head.
    [[gnu::noinline]] void find_visible(const weight_block<T>& block) {
        const auto queries = queries_from<T, Arch, tile_type::most_queries>(tile_.queries(), 0);
        const auto present = simd::lane_bits::first(queries.count);
        std::fill_n(block.seen, block.keys.count, block.keys.full ? present.value : 0);
        if (block.keys.full) return;
        for (index c = 0; c < (differs_by_head ? shape_.heads : 1); ++c) {
            const auto here = narrowed(at(call_.pattern, tile_.batch(), c), tile_.queries().positions(), block.keys.positions());
            for (index j = 0; j < block.keys.count; ++j) { // a pattern may answer with one bool for all queries
                const auto bits = (present && here.visible(queries, block.keys.first + j * block.keys.step)).value;
                visible(c)[j] = bits;
                block.seen[j] |= bits;
            }
        }
    }
    std::uint64_t* visible(index head) const { return visible_ + (differs_by_head ? head * tile_.block_keys() : 0); }

    /// The score function of one head, and the mask of its pattern.
    [[gnu::noinline]] void adjust_scores(const weight_block<T>& block, index head) {
        detail::scratch memory(score_memory_);
        auto function = score_type::take(memory, score_at(call_.score, tile_.batch(), head), tile_.block_keys(), tile_type::lane_count);
        const auto* const seen = visible(head);
        for (index reg = 0; reg < tile_.registers(); ++reg) {
            const auto lane = reg * tile_type::lane_count;
            const auto queries = queries_from<T, Arch, tile_type::lane_count>(tile_.queries(), lane);
            function.load(tile_.queries().part(lane, tile_type::lane_count), block.keys);
            for (index j = 0; j < block.keys.count; ++j) {
                if (!scored && (~seen[j] >> lane & simd::lane_bits::first(tile_type::lane_count).value) == 0) continue;
                T* const at = tile_.weights(block, head) + j * tile_.stride() + lane;
                auto x = lanes::load(at);
                if constexpr (scored) x = function(x, queries, block.keys.first + j * block.keys.step, j);
                if (!block.keys.full) x = select(simd::lane_bits{seen[j] >> lane}, x, lanes(hidden_score<T>));
                x.store(at);
            }
        }
    }

    const talking_heads_call<P, S>& call_;
    const talking_heads_shape& shape_;
    const talking_heads_mixings<T, Arch>& mixings_;
    bool keeps_, careful_ = false;
    tile_type tile_;
    std::uint64_t* visible_;
    std::byte* score_memory_ = nullptr;
    index first_key_ = 0;
};

} // namespace attn::kernel
