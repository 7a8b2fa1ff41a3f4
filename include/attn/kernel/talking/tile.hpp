// The steps of talking-heads attention on one panel of queries, all heads together.
#pragma once

#include "../../core/inputs.hpp"
#include "../work_ahead.hpp"
#include "memory.hpp"

#include <tuple>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The steps of one panel that no pattern or score function changes.
template <Scalar T, class Arch>
class talking_heads_tile {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = tile_traits<T, Arch>;
    using memory_type = talking_heads_memory<T, Arch>;
    static constexpr index lane_count = memory_type::lane_count, most_queries = memory_type::most_queries;

    talking_heads_tile(detail::scratch& memory, const talking_heads_shape& s, bool keeps_weights)
        : shape_(s), memory_(memory, s, keeps_weights) {}

    /// A new panel: the queries of `tile`, times factor, of one batch entry.
    void begin(const query_tile& tile, const inputs<T>& in, const outputs<T>& out, index batch, T factor) {
        tile_ = tile;
        in_ = &in;
        out_ = &out;
        batch_ = batch;
        registers_ = (tile.count + lane_count - 1) / lane_count;
        const auto first = tile.first - in.positions.first_query[batch];
        for (index a = 0; a < shape_.query_heads; ++a) {
            auto rows = rows_of(in.queries, batch, a);
            rows.data += first * rows.row_stride;
            rows.row_stride *= tile.step;
            transpose_rows<T, Arch>(rows, tile.count, shape_.key_channels, factor, memory_.queries + a * stride() * shape_.key_channels,
                                    stride());
        }
    }
    void reset_states() {
        for (index c = 0; c < shape_.heads; ++c) memory_.states[c].begin(stride());
    }
    void reset_values() { has_values_ = false; }
    /// Zeros, if no block has had any.
    void finish_values() {
        if (!has_values_) std::fill_n(memory_.values, shape_.value_heads * tile_.count * memory_.padded, T{0});
    }

    const query_tile& queries() const { return tile_; }
    index batch() const { return batch_; }
    index registers() const { return registers_; }
    index stride() const { return registers_ * lane_count; }
    index block_keys() const { return memory_.block_keys; }
    softmax_state<T, Arch>& state(index head) { return memory_.states[head]; }
    const T* values(index head, index query) const { return memory_.values + (head * tile_.count + query) * memory_.padded; }
    weight_block<T> block(index n, const key_run& keys, bool all_seen) const { return memory_.block(n, keys, all_seen); }
    /// Weights of one head, and scores until they become weights.
    T* weights(const weight_block<T>& block, index head) const { return block.weights + head * memory_.head_stride; }

    /// Scores of all heads with a block of keys, mixed, in place of its weights. Queries that see nothing of some keys may be left out.
    void multiply_keys(const weight_block<T>& block, const head_mixing<T, Arch>& mixing) {
        T* const logits = shape_.mixes_logits ? memory_.logits : block.weights;
        for_each_head(in_->keys, shape_.query_heads, block.keys, memory_.key_padded, false, [&](index a, const auto& rows) {
            const T* const queries = memory_.queries + a * stride() * shape_.key_channels;
            ahead_.spread(block.keys.count * registers_ * shape_.key_channels);
            for_each_piece(registers_, traits::max_columns, [&](index reg, index columns) {
                for_each_piece(block.keys.count, traits::max_rows(static_cast<int>(columns)), [&](index row, index count) {
                    index left = reg, right = reg + columns;
                    if (!block.all_seen) {
                        const auto seen = seen_by_any(block, row, count);
                        while (left < right && !(seen & bit_range(left * lane_count, lane_count))) ++left;
                        while (left < right && !(seen & bit_range((right - 1) * lane_count, lane_count))) --right;
                    }
                    with_constant<traits::max_columns>(right - left, [&](auto c) {
                        with_constant<traits::max_rows(c())>(count, [&](auto r) {
                            multiply_rows<r(), c()>(rows.data + row * rows.row_stride, rows.row_stride, queries + left * lane_count,
                                                    logits + a * memory_.head_stride + row * stride() + left * lane_count);
                        });
                    });
                });
            });
        });
        if (shape_.mixes_logits)
            mixing(as_heads(block), memory_.logits, block.weights, {});
    }
    /// Scores become weights relative to the largest score so far, times `unit`.
    void push_scores(const weight_block<T>& block, T unit) {
        for (index c = 0; c < shape_.heads; ++c) {
            memory_.states[c].push(weights(block, c), block.keys.count, stride());
            if (shape_.mixes_weights) std::copy_n(memory_.states[c].maximum, stride(), block.maximum + c * most_queries);
            if (unit == 1) continue;
            for (index at = 0; at < block.keys.count * stride(); ++at) weights(block, c)[at] *= unit;
        }
    }
    /// Which keys count for which query: those whose score is not -infinity in every head.
    void find_seen(const weight_block<T>& block) {
        for (index j = 0; j < block.keys.count; ++j) {
            std::uint64_t seen = 0;
            for (index c = 0; c < shape_.heads; ++c)
                for (index reg = 0; reg < registers_; ++reg) {
                    const auto hidden = lanes::load(weights(block, c) + j * stride() + reg * lane_count) == lanes(softmax_state<T, Arch>::hidden);
                    seen |= (~hidden.bits().value & bit_range(0, lane_count)) << reg * lane_count;
                }
            block.seen[j] = seen;
        }
    }

    /// Ends the first pass: a sink per head, -infinity for none, joins its rows, as a key without a value would. Weights were multiplied by `unit`.
    void finish_states(auto&& sink_of, T unit) {
        for (index c = 0; c < shape_.heads; ++c) {
            auto& state = memory_.states[c];
            std::copy_n(state.maximum, stride(), memory_.last_maximum + c * most_queries);
            const T sink = sink_of(c);
            const bool has_sink = sink != softmax_state<T, Arch>::hidden;
            for (index q = 0; q < stride(); q += lane_count) {
                const auto l = lanes::load(state.sum + q);
                const softmax_merge<T, Arch> merged(lanes(has_sink ? sink : softmax_state<T, Arch>::nothing), lanes(has_sink ? T{1} : T{0}),
                                                    lanes::load(state.maximum + q), l);
                select(l == lanes(T{0}), lanes(T{0}), merged.b / l / lanes(unit)).store(memory_.factor + c * most_queries + q);
                merged.maximum.store(state.maximum + q);
                merged.sum.store(state.sum + q);
            }
        }
    }
    /// The factor by which a head's values are multiplied in the end, where weights are not mixed.
    T factor(index head, index query) const { return shape_.mixes_weights ? T{1} : memory_.factor[head * most_queries + query]; }

    /// Adds the weighted values of a block, whose weights are mixed first if they are at all. careful: hidden keys are left out.
    /// blocks_left: how many are still to come, or some large number.
    void add_values(const weight_block<T>& block, const talking_heads_mixings<T, Arch>& mixings, bool careful, index blocks_left) {
        const T* from = block.weights;
        if (shape_.mixes_weights) {
            for (index c = 0; c < shape_.heads; ++c)
                for (index lane = 0; lane < stride(); lane += lane_count) {
                    const auto at = c * most_queries + lane;
                    const lanes below = simd::exp_nonpositive(lanes::load(block.maximum + at) - lanes::load(memory_.last_maximum + at));
                    (below * lanes::load(memory_.factor + at)).store(memory_.share + at);
                }
            mixings.weights(as_heads(block), block.weights, memory_.mixed,
                            {.factor = memory_.share, .factor_stride = most_queries, .ahead = memory_.next_block});
            from = memory_.mixed;
        }
        if (!block.all_seen) seen_keys_.find(block);
        for_each_head(in_->values, shape_.value_heads, block.keys, memory_.padded, true, [&](index e, const auto& rows) {
            ahead_.second = rows_at_the_end(e, blocks_left);
            ahead_.spread(block.keys.count * tile_.count * (memory_.padded / lane_count));
            add_head_values(block, e, from + e * memory_.head_stride, rows, careful);
        });
        has_values_ = true;
    }
    /// False if a value of NaN or infinity has come into the sums of a head, be it by a weight of 0.
    bool has_finite_values(index head) const {
        lanes zero(T{0});
        for (index at = 0; at < tile_.count * memory_.padded; at += lane_count)
            zero = fma(lanes::load(values(head, 0) + at), lanes(T{0}), zero);
        return (zero == lanes(T{0})).bits().value == bit_range(0, lane_count);
    }

private:
    /// Steps of a micro-kernel's depth between two looks ahead.
    static constexpr index between_fetches = 16;
    static std::uint64_t seen_by_any(const weight_block<T>& block, index row, index count) {
        std::uint64_t seen = 0;
        for (index j = row; j < row + count; ++j) seen |= block.seen[j];
        return seen;
    }
    head_block as_heads(const weight_block<T>& block) const {
        return {block.keys.count, registers_, memory_.head_stride, block.all_seen ? nullptr : block.seen};
    }
    /// Calls f(head, rows) for the heads that share the heads of keys or values: the rows of a block of them, where the micro-kernel can
    /// read them. With many heads each of these is a short piece of memory far from the last, which the hardware does not foresee:
    /// the next head's rows are asked for beside the arithmetic on this one's, in the order of memory. That took 13 % off 512 tokens in
    /// twelve heads, a fifth or more off 1024 and 4096.
    template <class F>
    void for_each_head(const tensor_view<const T>& tensor, index heads, const key_run& keys, index padded, bool needs_padding, F&& f) {
        const auto kv_heads = tensor.shape().heads, channels = tensor.shape().channels;
        const auto rows_at = [&](index head, index first) {
            auto rows = rows_of(tensor, batch_, head);
            rows.data += (first - in_->positions.first_key[batch_]) * rows.row_stride;
            rows.row_stride *= keys.step;
            return rows;
        };
        for (index head = 0; head < kv_heads; ++head) {
            auto rows = rows_at(head, keys.first);
            if (!readable_in_place(rows) || (needs_padding && padded != channels)) {
                copy_rows<T, Arch>(rows, keys.count, channels, memory_.packed, padded);
                rows = {memory_.packed, padded, 1};
            }
            const auto next = head + 1 < kv_heads ? rows_at(head + 1, keys.first) : rows_at(0, keys.first + keys.count * keys.step);
            ahead_ = {{next, keys.count, channels}, {}, 0};
            for (index own = head * heads / kv_heads; own < (head + 1) * heads / kv_heads; ++own) f(own, rows);
        }
    }
    /// What one head needs when the panel ends, asked for no sooner than it can wait for it in the second-level cache: beside the last
    /// block the rows of the result, beside the one before the queries of the next panel. That took 1 % off 1024 tokens, causal 1 to 2 %.
    rows_ahead<const T> rows_at_the_end(index head, index blocks_left) const {
        const auto first = tile_.first - in_->positions.first_query[batch_], next = first + tile_.count * tile_.step;
        const auto rows_from = [&](const auto& tensor, index row) {
            const auto& s = tensor.shape();
            auto rows = rows_of(tensor, batch_, head);
            rows.data += row * rows.row_stride;
            return rows_ahead<const T>({rows.data, rows.row_stride * tile_.step, rows.channel_stride},
                                       std::min(tile_.count, (s.tokens - row + tile_.step - 1) / tile_.step), s.channels);
        };
        if (blocks_left == 0) return rows_from(out_->values, first);
        if (blocks_left == 1 && head < shape_.query_heads && next < in_->queries.shape().tokens) return rows_from(in_->queries, next);
        return {};
    }

    template <int Rows, int Columns>
    [[gnu::noinline]] void multiply_rows(const T* rows, index key_stride, const T* queries, T* scores) {
        matrix_tile<Rows, Columns, T, Arch> tile;
        tile.zero();
        for (index c = 0; c < shape_.key_channels; c += between_fetches) {
            ahead_.fetch();
            tile.multiply_add(rows + c, key_stride, unit_stride{}, queries + c * stride(), stride(),
                              std::min(between_fetches, shape_.key_channels - c));
        }
        tile.store(scores, stride());
    }

    void add_head_values(const weight_block<T>& block, index head, const T* weights, const row_block<const T>& rows, bool careful) {
        for_each_piece(memory_.padded / lane_count, traits::max_columns, [&](index first, index columns) {
            with_constant<traits::max_columns>(columns, [&](auto c) {
                for_each_piece(tile_.count, careful ? 1 : traits::max_rows(c()), [&](index query, index count) {
                    with_constant<traits::max_rows(c())>(count, [&](auto r) {
                        add_weighted_values<r(), c()>(block, head, weights, rows, query, first * lane_count, careful);
                    });
                });
            });
        });
    }
    /// A group of queries skips the keys before and after those it sees; a careful one, of one query, all that it does not see.
    template <int Rows, int Columns>
    [[gnu::noinline]] void add_weighted_values(const weight_block<T>& block, index head, const T* weights, const row_block<const T>& rows,
                                               index query, index channel, bool careful) {
        matrix_tile<Rows, Columns, T, Arch> tile;
        T* const output = memory_.values + (head * tile_.count + query) * memory_.padded + channel;
        if (!has_values_)
            tile.zero();
        else if (shape_.mixes_weights)
            tile.load(output, memory_.padded);
        else
            tile.load_scaled(output, memory_.padded, memory_.states[head].factor + query);
        const auto own = bit_range(query, Rows);
        index first = 0, last = block.keys.count;
        if (!block.all_seen && !careful) std::tie(first, last) = seen_keys_.of(query, Rows);
        const index most = careful ? 1 : between_fetches;
        for (; first < last; first += most) {
            if (careful && !(block.seen[first] & own)) continue;
            ahead_.fetch();
            tile.multiply_add(weights + first * stride() + query, unit_stride{}, stride(), rows.data + first * rows.row_stride + channel,
                              rows.row_stride, std::min(most, last - first));
        }
        tile.store(output, memory_.padded);
    }

    talking_heads_shape shape_;
    talking_heads_memory<T, Arch> memory_;

    query_tile tile_{};
    const inputs<T>* in_ = nullptr;
    const outputs<T>* out_ = nullptr;
    work_ahead<T> ahead_;
    seen_keys<most_queries> seen_keys_; ///< of a block that is not all seen
    index batch_ = 0, registers_ = 0;
    bool has_values_ = false; ///< of any block
};

} // namespace attn::kernel
