// One panel of queries of talking-heads attention, all heads together: its memory, and the steps that no pattern or score function changes.
#pragma once

#include "../core/inputs.hpp"
#include "../pattern/schedule.hpp"
#include "../simd/positions.hpp"
#include "head_mixing.hpp"
#include "online_softmax.hpp"
#include "tile_loader.hpp"

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

    /// Keys of a block: some 32, so that the last block of a sequence is not much shorter than the others.
    static constexpr index block_keys(index keys) {
        constexpr index good = 32;
        const auto blocks = std::max<index>(1, (keys + good / 2) / good);
        return std::max<index>(1, (keys + blocks - 1) / blocks);
    }

    /// keeps_weights: whether there is memory for the weights of all keys. Else there is for those of one block.
    talking_heads_tile(detail::scratch& memory, const talking_heads_shape& s, bool keeps_weights)
        : shape_(s), block_keys_(block_keys(s.keys)), head_stride_(block_keys_ * most_queries),
          key_padded_(whole_registers(s.key_channels)), padded_(whole_registers(s.value_channels)),
          queries_(memory.take<T>(s.query_heads * most_queries * s.key_channels)),
          logits_(memory.take<T>(s.mixes_logits ? s.query_heads * head_stride_ : 0)),
          mixed_(memory.take<T>(s.mixes_weights ? s.value_heads * head_stride_ : 0)),
          values_(memory.take<T>(s.value_heads * most_queries * padded_)), factor_(memory.take<T>(s.heads * most_queries)),
          last_maximum_(memory.take<T>(s.heads * most_queries)), share_(memory.take<T>(s.mixes_weights ? s.heads * most_queries : 0)),
          packed_(memory.take<T>(block_keys_ * std::max(key_padded_, padded_))), states_(memory.take<online_softmax<T, Arch>>(s.heads)) {
        blocks_ = keeps_weights ? std::max<index>(1, (s.keys + block_keys_ - 1) / block_keys_) : 1;
        for (index c = 0; c < s.heads; ++c) {
            auto state = online_softmax<T, Arch>::take(memory, most_registers, 0);
            if (states_) states_[c] = state;
        }
        maximum_ = memory.take<T>(blocks_ * s.heads * most_queries);
        seen_ = memory.take<std::uint64_t>(blocks_ * block_keys_);
        weights_ = memory.take<T>(blocks_ * s.heads * head_stride_);
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
    void reset_values() { std::fill_n(values_, shape_.value_heads * tile_.count * padded_, T{0}); }

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
        const auto kv_heads = in_->keys.shape().heads;
        index packed = -1;
        for (index a = 0; a < shape_.query_heads; ++a) {
            const auto head = a / (shape_.query_heads / kv_heads);
            auto rows = block_rows(in_->keys, head, block.keys);
            if (!readable_in_place(rows)) {
                if (packed != head) copy_rows<T, Arch>(rows, block.keys.count, shape_.key_channels, packed_, key_padded_);
                packed = head;
                rows = {packed_, key_padded_, 1};
            }
            const T* const queries = queries_ + a * stride() * shape_.key_channels;
            for_each_piece(registers_, traits::max_columns, [&](index reg, index columns) {
                for_each_piece(block.keys.count, traits::max_rows(static_cast<int>(columns)), [&](index row, index count) {
                    if (!block.all_seen && !(seen_by_any(block, row, count) & bits(reg * lane_count, columns * lane_count))) return;
                    with_constant<traits::max_columns>(columns, [&](auto c) {
                        with_constant<traits::max_rows(c())>(count, [&](auto r) {
                            multiply_rows<r(), c()>(rows.data + row * rows.row_stride, rows.row_stride, queries + reg * lane_count,
                                                    scores + a * head_stride_ + row * stride() + reg * lane_count);
                        });
                    });
                });
            });
        }
        if (shape_.mixes_logits) mixing(as_heads(block), logits_, block.weights);
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
            mixings.weights(as_heads(block), block.weights, mixed_, share_, most_queries);
            from = mixed_;
        }
        const auto kv_heads = in_->values.shape().heads;
        index packed = -1;
        for (index e = 0; e < shape_.value_heads; ++e) {
            const auto head = e / (shape_.value_heads / kv_heads);
            auto rows = block_rows(in_->values, head, block.keys);
            if (!readable_in_place(rows) || padded_ != shape_.value_channels) {
                if (packed != head) copy_rows<T, Arch>(rows, block.keys.count, shape_.value_channels, packed_, padded_);
                packed = head;
                rows = {packed_, padded_, 1};
            }
            add_head_values(block, e, from + e * head_stride_, rows, careful);
        }
    }
    /// False if a value of NaN or infinity has come into the sums, be it by a weight of 0.
    bool has_finite_values() const {
        lanes zero(T{0});
        const auto count = shape_.value_heads * tile_.count * padded_;
        for (index at = 0; at < count; at += lane_count) zero = fma(lanes::load(values_ + at), lanes(T{0}), zero);
        return (zero == lanes(T{0})).bits().value == bits(0, lane_count);
    }

private:
    static constexpr index whole_registers(index channels) { return (channels + lane_count - 1) / lane_count * lane_count; }
    static std::uint64_t bits(index first, index count) { return simd::lane_bits::first(count).value << first; }
    static std::uint64_t seen_by_any(const weight_block<T>& block, index row, index count) {
        std::uint64_t seen = 0;
        for (index j = row; j < row + count; ++j) seen |= block.seen[j];
        return seen;
    }
    head_block as_heads(const weight_block<T>& block) const {
        return {block.keys.count, registers_, head_stride_, block.all_seen ? nullptr : block.seen};
    }
    template <class U>
    row_block<U> block_rows(const tensor_view<U>& tensor, index head, const key_run& keys) const {
        auto rows = rows_of(tensor, batch_, head);
        rows.data += (keys.first - in_->positions.first_key[batch_]) * rows.row_stride;
        rows.row_stride *= keys.step;
        return rows;
    }

    template <int Rows, int Columns>
    [[gnu::noinline]] void multiply_rows(const T* rows, index key_stride, const T* queries, T* scores) const {
        matrix_tile<Rows, Columns, T, Arch> tile;
        tile.zero();
        tile.multiply_add(rows, key_stride, unit_stride{}, queries, stride(), shape_.key_channels);
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
        if (shape_.mixes_weights)
            tile.load(output, padded_);
        else
            tile.load_scaled(output, padded_, states_[head].factor + query);
        const auto add = [&](index first, index last) {
            tile.multiply_add(weights + first * stride() + query, unit_stride{}, stride(), rows.data + first * rows.row_stride + channel,
                              rows.row_stride, last - first);
        };
        if (block.all_seen) {
            add(0, block.keys.count);
        } else {
            const auto own = bits(query, Rows);
            index first = 0, last = block.keys.count;
            if (careful) {
                for (; first < last; ++first)
                    if (block.seen[first] & own) add(first, first + 1);
            } else {
                while (first < last && !(block.seen[first] & own)) ++first;
                while (first < last && !(block.seen[last - 1] & own)) --last;
                add(first, last);
            }
        }
        tile.store(output, padded_);
    }

    talking_heads_shape shape_;
    index block_keys_, head_stride_, key_padded_, padded_, blocks_ = 1;
    T *queries_, *logits_, *mixed_, *values_, *factor_, *last_maximum_, *share_, *packed_;
    online_softmax<T, Arch>* states_;
    T *maximum_ = nullptr, *weights_ = nullptr;
    std::uint64_t* seen_ = nullptr;

    query_tile tile_{};
    const inputs<T>* in_ = nullptr;
    index batch_ = 0, registers_ = 0;
};

} // namespace attn::kernel
