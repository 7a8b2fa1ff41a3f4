// The memory in which one thread computes linear attention, and blocks of rows, brought to where the micro-kernels read them.
#pragma once

#include "../convolution/depthwise.hpp"
#include "feature_loader.hpp"
#include "order.hpp"
#include "scores.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Room for a chunk of queries and a block of keys.
template <Scalar T>
struct linear_worker {
    using state_type = linear_state<T>;

    /// A short row of a grid may make a chunk longer than `target_rows`.
    static constexpr index_t max_queries = 128, max_keys = 128;
    /// Queries of a chunk, and keys of a block, a power of two. With keys, values and what is fetched for the next block they fill the
    /// first-level cache twice; half as many would leave the micro-kernel at its beginnings and ends more often.
    static index_t target_rows(const input_shapes& s) {
        constexpr std::size_t bytes = 32768;
        const auto channels = std::max(state_type::whole(s.keys.channels), whole_registers<T>(s.values.channels));
        return std::clamp<index_t>(static_cast<index_t>(std::bit_floor(bytes / sizeof(T) / static_cast<std::size_t>(channels))), 32,
                                   max_keys);
    }

    /// grid: of the convolution, or null. staged_numbers: what features are made of.
    linear_worker(detail::scratch& memory, const input_shapes& s, const convolution_grid* grid, bool has_state, index_t staged_numbers)
        : key_padded(state_type::whole(s.keys.channels)), padded(whole_registers<T>(s.values.channels)),
          queries(memory.take<T>(max_queries * key_padded)), keys(memory.take<T>(max_keys * key_padded)),
          packed_values(memory.take<T>(max_keys * padded)), numerators(memory.take<T>(max_queries * padded)),
          spare(memory.take<T>(tile_traits<T>::max_rows(1) * padded)), local(memory.take<T>(grid ? max_queries * padded : 0)),
          factors(memory.take<T>(max_queries)), seen(memory.take<index_t>(max_queries)),
          scores(memory, max_queries, max_keys, s.keys.channels, padded),
          state(has_state ? state_type::take(memory, s.keys.channels, s.values.channels) : state_type{}),
          convolution(memory, grid ? *grid : convolution_grid{}, grid ? s.values.channels : 0, max_queries),
          staged(memory.take<T>(staged_numbers)) {}

    index_t key_padded, padded; ///< d_k and d_v in whole registers
    T *queries, *keys;          ///< features
    T *packed_values, *numerators, *spare, *local, *factors;
    index_t* seen; ///< keys of the block that each query of the chunk sees
    linear_scores<T> scores;
    state_type state; ///< of a head whose sum grows from chunk to chunk
    convolution_tile<T> convolution;
    T* staged;           ///< rows that features are made of
    prefetch_next ahead; ///< what is read next
};

/// The features of rows first .. first + count - 1 of a head: where they lie if that will do, else, or if they are to be `written`, in
/// `to`. Those of causal chunks are scored, and so written in any case: it spares their micro-kernels an instance that applies a map.
template <bool causal, Scalar T, class Features>
auto load_features(const Features& features, index_t batch, index_t head, index_t first, index_t count, const linear_worker<T>& w, T* to,
                   bool written) {
    if constexpr (requires { features.staged(); }) {
        features(batch, head, first, count, to, w.staged);
        return feature_rows<T>{to, count, w.key_padded};
    } else if constexpr (causal) {
        features(batch, head, first, count, to);
        return feature_rows<T>{to, count, w.key_padded};
    } else {
        return features.load(batch, head, first, count, to, written || !linear_state<T>::maps_on_reading(w.padded));
    }
}

/// The keys of one head, block by block.
template <Scalar T, class Features, Pattern P>
struct linear_keys {
    using worker = linear_worker<T>;
    using order_type = linear_order<T, P>;

    const inputs<T>& in;
    const Features& features;
    order_type order;
    index_t batch, kv_head;

    /// A block, ready to be pushed or scored.
    struct block {
        using loaded =
            decltype(load_features<order_type::causal, T>(std::declval<const Features&>(), index_t{}, index_t{}, index_t{}, index_t{},
                                                          std::declval<const worker&>(), static_cast<T*>(nullptr), bool{}));
        loaded rows;
        const T* values;
        index_t value_stride, first;

        index_t end() const { return first + rows.count; }
    };

    block load(worker& w, index_t first, index_t count, bool scored) const {
        const auto values = in.values.rows(batch, kv_head, first);
        const auto channels = in.values.shape().channels;
        block b{load_features<order_type::causal, T>(features, batch, kv_head, first, count, w, w.keys, scored), values.numbers().data,
                values.row_stride, first};
        if (!readable_in_place(values) || w.padded != channels) {
            copy_rows<T>(values, count, channels, w.packed_values, w.padded);
            b.values = w.packed_values;
            b.value_stride = w.padded;
        }
        return b;
    }
    /// Calls f(first key, count) for the blocks that the keys first .. end - 1 fall into: they begin at absolute multiples of `size`.
    void for_each(index_t first, index_t end, index_t size, const auto& f) const {
        while (first < end) {
            const auto stop = std::min(end, order.block_end(batch, first, size));
            f(first, stop - first);
            first = stop;
        }
    }
    /// Beside the products of a block as many keys are asked for as follow it.
    void push(worker& w, const block& b, const linear_state<T>& state) const {
        w.ahead.clear();
        if (const auto next = b.end(), count = std::min(b.rows.count, in.keys.shape().tokens - next); count > 0) {
            w.ahead.add(in.keys.rows(batch, kv_head, next), count, in.keys.shape().channels);
            w.ahead.add(in.values.rows(batch, kv_head, next), count, in.values.shape().channels);
            w.ahead.spread(b.rows.count * w.key_padded * w.padded / simd::lanes<T>::size);
        }
        state.push(b.rows, b.values, b.value_stride, w.ahead);
    }
    /// Pushes the keys first .. end - 1, each block of them summed by itself.
    void push(worker& w, index_t first, index_t end, index_t size, const linear_state<T>& state) const {
        for_each(first, end, size, [&](index_t at, index_t count) { push(w, load(w, at, count, false), state); });
    }
};

} // namespace attn::kernel
