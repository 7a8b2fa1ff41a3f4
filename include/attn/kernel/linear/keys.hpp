// Blocks of rows of linear attention, brought to where the micro-kernels read them.
#pragma once

#include "feature_loader.hpp"
#include "order.hpp"
#include "worker.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The features of rows first .. first + count - 1 of a head: where they lie if that will do, else, or if they are to be `written`, in
/// `to`. Those of causal chunks are scored, and so written in any case: it spares their micro-kernels an instance that applies a map.
template <bool causal, Scalar T, class Features>
auto load_features(const Features& features, index_t batch, index_t head, index_t first, index_t count, const linear_worker<T>& w, T* to,
                   bool written) {
    if constexpr (causal) {
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
        }
        state.push(b.rows, b.values, b.value_stride, w.ahead);
    }
    /// Pushes the keys first .. end - 1, each block of them summed by itself.
    void push(worker& w, index_t first, index_t end, index_t size, const linear_state<T>& state) const {
        for_each(first, end, size, [&](index_t at, index_t count) { push(w, load(w, at, count, false), state); });
    }
};

} // namespace attn::kernel
