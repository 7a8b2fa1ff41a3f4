// One panel of queries of talking-heads attention, all heads together: its memory, and the steps that no pattern or score function changes.
#pragma once

#include "../core/inputs.hpp"
#include "../pattern/schedule.hpp"
#include "../simd/positions.hpp"
#include "head_mixing.hpp"
#include "online_softmax.hpp"
#include "work_ahead.hpp"

namespace attn::kernel {

/// What the steps of talking-heads attention share. A mixing without columns is absent.
template <Scalar T, class Arch>
struct talking_heads_mixings {
    head_mixing<T, Arch> logits, weights;
    bool has_weights_bias = false;
};

/// How many heads there are, of how many channels, and the keys that a panel walks in blocks.
struct talking_heads_shape {
    index query_heads, heads, value_heads;
    index key_channels, value_channels;
    index keys;
    bool mixes_logits, mixes_weights;
};

/// A block of keys: their weights in every head, and what was known when these were computed.
template <Scalar T>
struct weight_block {
    key_run keys;
    T* weights;          ///< [heads][keys of a block][queries] 2^(score - maximum)
    T* maximum;          ///< [heads][queries] the largest score up to this block
    std::uint64_t* seen; ///< [keys] one bit per query: whether any head sees the key
    bool all_seen;       ///< then `seen` is not filled in
};

template <Scalar T, class Arch>
class talking_heads_tile {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = tile_traits<T, Arch>;
    static constexpr index lane_count = lanes::size;
    /// Queries of a panel in registers: so few that the scores of all heads for a block of keys stay in the second-level cache.
    static constexpr index most_registers = simd::register_count<Arch> >= 32 ? 3 : 6;
    static constexpr index most_queries = most_registers * lane_count;
    static_assert(most_queries <= 64, "a key's visibility is kept as one bit per query");

    /// Keys of a block: some 64, so that the last block of a sequence is not much shorter than the others.
    static constexpr index block_keys(index keys) {
        constexpr index good = 64;
        const auto blocks = std::max<index>(1, (keys + good / 2) / good);
        return std::max<index>(1, (keys + blocks - 1) / blocks);
    }

    /// Numbers from one head of a block to the next. The mixings read all heads at once: one row more than there are keys, so that they do
    /// not lie a multiple of 4 KiB apart, in the same sets of the first-level cache.
    static constexpr index head_stride(index keys) { return (block_keys(keys) + 1) * most_queries; }

    /// keeps_weights: whether there is memory for the weights of all keys. Else there is for those of one block.
    talking_heads_tile(detail::scratch& memory, const talking_heads_shape& s, bool keeps_weights)
        : shape_(s), block_keys_(block_keys(s.keys)), head_stride_(head_stride(s.keys)), key_padded_(whole_registers(s.key_channels)),
          padded_(whole_registers(s.value_channels)),
          blocks_(keeps_weights ? std::max<index>(1, (s.keys + block_keys_ - 1) / block_keys_) : 1),
          logits_(memory.take<T>(s.mixes_logits ? s.query_heads * head_stride_ : 0)),
          mixed_(memory.take<T>(s.mixes_weights ? s.value_heads * head_stride_ : 0)),
          packed_(memory.take<T>(block_keys_ * std::max(key_padded_, padded_))),
          queries_(memory.take<T>(s.query_heads * most_queries * s.key_channels)),
          values_(memory.take<T>(s.value_heads * most_queries * padded_)), factor_(memory.take<T>(s.heads * most_queries)),
          last_maximum_(memory.take<T>(s.heads * most_queries)), share_(memory.take<T>(s.mixes_weights ? s.heads * most_queries : 0)),
          maximum_(memory.take<T>(blocks_ * s.heads * most_queries)), weights_(memory.take<T>(blocks_ * s.heads * head_stride_)),
          seen_(memory.take<std::uint64_t>(blocks_ * block_keys_)), states_(memory.take<online_softmax<T, Arch>>(s.heads)) {
        for (index c = 0; c < s.heads; ++c) {
            const auto state = online_softmax<T, Arch>::take(memory, most_registers, 0);
            if (states_) states_[c] = state;
        }
    }

    /// A new panel: the queries of `tile`, times factor, of one batch entry.
    void begin(const query_tile& tile, const inputs<T>& in, index batch, T factor) {
        tile_ = tile;
        in_ = &in;
        batch_ = batch;
        registers_ = (tile.count + lane_count - 1) / lane_count;
        const auto first = tile.first - in.positions.first_query[batch];
        for (index a = 0; a < shape_.query_heads; ++a) {
            auto rows = rows_of(in.queries, batch, a);
            rows.data += first * rows.row_stride;
            rows.row_stride *= tile.step;
            transpose_rows<T, Arch>(rows, tile.count, shape_.key_channels, factor, queries_ + a * stride() * shape_.key_channels, stride());
        }
    }
    void reset_states() {
        for (index c = 0; c < shape_.heads; ++c) states_[c].reset(registers_);
    }
    void reset_values() { has_values_ = false; }
    /// Zeros, if no block has had any.
    void finish_values() {
        if (!has_values_) std::fill_n(values_, shape_.value_heads * tile_.count * padded_, T{0});
    }

    const query_tile& queries() const { return tile_; }
    index batch() const { return batch_; }
    index registers() const { return registers_; }
    index stride() const { return registers_ * lane_count; }
    index block_keys() const { return block_keys_; }
    online_softmax<T, Arch>& state(index head) { return states_[head]; }
    const T* values(index head, index query) const { return values_ + (head * tile_.count + query) * padded_; }
    /// Block number n. Where weights are not kept, all blocks share the same memory.
    weight_block<T> block(index n, const key_run& keys, bool all_seen) const {
        const auto slot = blocks_ > 1 ? n : 0;
        return {keys, weights_ + slot * shape_.heads * head_stride_, maximum_ + slot * shape_.heads * most_queries,
                seen_ + slot * block_keys_, all_seen};
    }
    T* weights(const weight_block<T>& block, index head) const { return block.weights + head * head_stride_; }

    template <int Size>
    simd::query_lanes<T, Arch, Size> positions_from(index lane) const {
        simd::query_lanes<T, Arch, Size> result;
        result.first = tile_.first + lane * tile_.step;
        result.step = tile_.step;
        result.count = static_cast<int>(std::min<index>(Size, tile_.count - lane));
        return result;
    }

    /// Scores of all heads with a block of keys, mixed, in place of its weights. Queries that see nothing of some keys may be left out.
    void multiply_keys(const weight_block<T>& block, const head_mixing<T, Arch>& mixing) {
        T* const scores = shape_.mixes_logits ? logits_ : block.weights;
        for_each_head(in_->keys, shape_.query_heads, block.keys, key_padded_, false, [&](index a, const auto& rows) {
            const T* const queries = queries_ + a * stride() * shape_.key_channels;
            ahead_.spread(block.keys.count * registers_ * shape_.key_channels);
            for_each_piece(registers_, traits::max_columns, [&](index reg, index columns) {
                for_each_piece(block.keys.count, traits::max_rows(static_cast<int>(columns)), [&](index row, index count) {
                    index left = reg, right = reg + columns;
                    if (!block.all_seen) {
                        const auto seen = seen_by_any(block, row, count);
                        while (left < right && !(seen & bits(left * lane_count, lane_count))) ++left;
                        while (left < right && !(seen & bits((right - 1) * lane_count, lane_count))) --right;
                    }
                    with_constant<traits::max_columns>(right - left, [&](auto c) {
                        with_constant<traits::max_rows(c())>(count, [&](auto r) {
                            multiply_rows<r(), c()>(rows.data + row * rows.row_stride, rows.row_stride, queries + left * lane_count,
                                                    scores + a * head_stride_ + row * stride() + left * lane_count);
                        });
                    });
                });
            });
        });
        if (shape_.mixes_logits) mixing(as_heads(block), logits_, block.weights, nullptr, 0, 0, next_block());
    }
    /// Scores become weights relative to the largest score so far.
    void push_scores(const weight_block<T>& block) {
        for (index c = 0; c < shape_.heads; ++c) {
            states_[c].raise_maximum(weights(block, c), block.keys.count);
            states_[c].push_scores(weights(block, c), block.keys.count);
            if (shape_.mixes_weights) std::copy_n(states_[c].maximum, stride(), block.maximum + c * most_queries);
        }
    }
    /// Which keys count for which query: those that score more than a hidden key in any head.
    void find_seen(const weight_block<T>& block) {
        for (index j = 0; j < block.keys.count; ++j) {
            std::uint64_t seen = 0;
            for (index c = 0; c < shape_.heads; ++c)
                for (index reg = 0; reg < registers_; ++reg) {
                    const auto hidden = lanes::load(weights(block, c) + j * stride() + reg * lane_count) < lanes(lowest_maximum<T>);
                    seen |= (~hidden.bits().value & bits(0, lane_count)) << reg * lane_count;
                }
            block.seen[j] = seen;
        }
    }

    /// Ends the first pass: a sink per head, in natural units and -infinity for none.
    void finish_states(auto&& sink_of) {
        for (index c = 0; c < shape_.heads; ++c) {
            std::copy_n(states_[c].maximum, stride(), last_maximum_ + c * most_queries);
            states_[c].finish(sink_of(c));
            std::copy_n(states_[c].factor, stride(), factor_ + c * most_queries);
        }
    }
    /// The factor by which a head's values are multiplied in the end, where weights are not mixed.
    T factor(index head, index query) const { return shape_.mixes_weights ? T{1} : factor_[head * most_queries + query]; }

    /// Adds the weighted values of a block, whose weights are mixed first if they are at all. careful: hidden keys are left out.
    void add_values(const weight_block<T>& block, const talking_heads_mixings<T, Arch>& mixings, bool careful) {
        const T* from = block.weights;
        if (shape_.mixes_weights) {
            for (index c = 0; c < shape_.heads; ++c)
                for (index lane = 0; lane < stride(); lane += lane_count) {
                    const auto at = c * most_queries + lane;
                    const lanes below = simd::exp2_nonpositive(lanes::load(block.maximum + at) - lanes::load(last_maximum_ + at));
                    (below * lanes::load(factor_ + at)).store(share_ + at);
                }
            mixings.weights(as_heads(block), block.weights, mixed_, share_, most_queries, next_block());
            from = mixed_;
        }
        if (!block.all_seen) find_ends(block);
        for_each_head(in_->values, shape_.value_heads, block.keys, padded_, true, [&](index e, const auto& rows) {
            ahead_.spread(block.keys.count * tile_.count * (padded_ / lane_count));
            add_head_values(block, e, from + e * head_stride_, rows, careful);
        });
        has_values_ = true;
    }
    /// False if a value of NaN or infinity has come into the sums of a head, be it by a weight of 0.
    bool has_finite_values(index head) const {
        lanes zero(T{0});
        for (index at = 0; at < tile_.count * padded_; at += lane_count) zero = fma(lanes::load(values(head, 0) + at), lanes(T{0}), zero);
        return (zero == lanes(T{0})).bits().value == bits(0, lane_count);
    }

private:
    /// Steps of a micro-kernel's depth between two looks ahead.
    static constexpr index between_fetches = 16;
    static constexpr index whole_registers(index channels) { return (channels + lane_count - 1) / lane_count * lane_count; }
    static std::uint64_t bits(index first, index count) { return simd::lane_bits::first(count).value << first; }
    static std::uint64_t seen_by_any(const weight_block<T>& block, index row, index count) {
        std::uint64_t seen = 0;
        for (index j = row; j < row + count; ++j) seen |= block.seen[j];
        return seen;
    }
    /// Between which keys of a block each query sees some, once for all heads.
    void find_ends(const weight_block<T>& block) {
        first_seen_.fill(block.keys.count);
        end_seen_.fill(0);
        const auto walk = [&](index j, std::uint64_t& known, auto&& tell) {
            for (auto newly = block.seen[j] & ~known; newly != 0; newly &= newly - 1)
                tell(static_cast<std::size_t>(std::countr_zero(newly)));
            known |= block.seen[j];
        };
        std::uint64_t from_first = 0, from_last = 0;
        for (index j = 0; j < block.keys.count; ++j) walk(j, from_first, [&](std::size_t q) { first_seen_[q] = j; });
        for (index j = block.keys.count; j-- > 0;) walk(j, from_last, [&](std::size_t q) { end_seen_[q] = j + 1; });
    }
    head_block as_heads(const weight_block<T>& block) const {
        return {block.keys.count, registers_, head_stride_, block.all_seen ? nullptr : block.seen};
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
                copy_rows<T, Arch>(rows, keys.count, channels, packed_, padded);
                rows = {packed_, padded, 1};
            }
            const auto next = head + 1 < kv_heads ? rows_at(head + 1, keys.first) : rows_at(0, keys.first + keys.count * keys.step);
            ahead_ = {{next, keys.count, channels}, {}, 0};
            for (index own = head * heads / kv_heads; own < (head + 1) * heads / kv_heads; ++own) f(own, rows);
        }
    }
    /// Numbers from the weights of a block to those of the next, 0 where that takes the same memory.
    index next_block() const { return blocks_ > 1 ? shape_.heads * head_stride_ : 0; }

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
        for_each_piece(padded_ / lane_count, traits::max_columns, [&](index first, index columns) {
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
        T* const output = values_ + (head * tile_.count + query) * padded_ + channel;
        if (!has_values_)
            tile.zero();
        else if (shape_.mixes_weights)
            tile.load(output, padded_);
        else
            tile.load_scaled(output, padded_, states_[head].factor + query);
        const auto own = bits(query, Rows);
        index first = 0, last = block.keys.count;
        if (!block.all_seen && !careful) {
            first = *std::min_element(first_seen_.data() + query, first_seen_.data() + query + Rows);
            last = *std::max_element(end_seen_.data() + query, end_seen_.data() + query + Rows);
        }
        const index most = careful ? 1 : between_fetches;
        for (; first < last; first += most) {
            if (careful && !(block.seen[first] & own)) continue;
            ahead_.fetch();
            tile.multiply_add(weights + first * stride() + query, unit_stride{}, stride(), rows.data + first * rows.row_stride + channel,
                              rows.row_stride, std::min(most, last - first));
        }
        tile.store(output, padded_);
    }

    talking_heads_shape shape_;
    index block_keys_, head_stride_, key_padded_, padded_, blocks_;
    T *logits_, *mixed_, *packed_; ///< scores before the first mixing, weights after the second, rows that cannot be read in place
    T *queries_, *values_, *factor_, *last_maximum_, *share_, *maximum_, *weights_;
    std::uint64_t* seen_;
    online_softmax<T, Arch>* states_;

    query_tile tile_{};
    const inputs<T>* in_ = nullptr;
    work_ahead<T> ahead_;
    std::array<index, most_queries> first_seen_{}, end_seen_{}; ///< keys of a block that is not all seen
    index batch_ = 0, registers_ = 0;
    bool has_values_ = false; ///< of any block
};

} // namespace attn::kernel
