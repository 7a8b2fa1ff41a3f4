// The keys of a tile of attention: runs of keys and values, read where they lie or gathered where that would be slow.
#pragma once

#include "../core/workspace.hpp"
#include "../pattern/schedule.hpp"
#include "work_ahead.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A run of keys inside a tile: rows [first_row, first_row + keys.count) of the tile's scores.
template <Scalar T>
struct key_segment {
    key_run keys;
    index first_row;
    const T *key_rows, *value_rows;
    index key_stride, value_stride;

    /// `count` of its keys, from one of them on.
    key_segment part(index first, index count) const {
        auto run = keys;
        run.first += first * run.step;
        run.count = count;
        return {run, first_row + first, key_rows + first * key_stride, value_rows + first * value_stride, key_stride, value_stride};
    }
};

/// The segments of one tile after the other, for panels of queries that follow each other.
template <Scalar T, class Arch>
class tile_keys {
public:
    /// Keys of a tile: enough to hide the loads and stores of O, few enough for the cache. A rest may make it longer.
    static constexpr index good = 128, most = 192;
    /// Keys of a residue class that are gathered but once for the panels of it that follow each other. Rows of a stride lie in few sets of
    /// the caches: gathered for each panel anew, 256 keys took a fifth of the time.
    static constexpr index most_kept = 256;
    static constexpr std::size_t most_segments = 16;

    tile_keys(detail::scratch& memory, index key_channels, index value_channels)
        : keys_(memory, key_channels), values_(memory, value_channels) {}

    /// A new panel of queries. Row 0 of keys and values is at first_key.
    void begin(const query_tile& tile, const row_block<const T>& keys, const row_block<const T>& values, index first_key, index key_count) {
        const auto residue = floor_mod(tile.first - first_key, tile.step);
        const bool same_class = tile.step == step_ && residue == residue_ && first_key == first_key_ && keys.data == keys_.rows.data &&
                                values.data == values_.rows.data;
        if (!same_class) keys_.kept = values_.kept = 0;
        keeps_ = tile.step > 1 && (key_count - residue + tile.step - 1) / tile.step <= most_kept;
        residue_ = residue;
        step_ = tile.step;
        first_key_ = first_key;
        key_count_ = key_count;
        keys_.rows = keys;
        values_.rows = values;
    }
    /// Appends keys to the tile.
    const key_segment<T>& add(const key_run& run) {
        auto& segment = segments_[segment_count_++];
        segment = {run, rows_, nullptr, nullptr, 0, 0};
        const auto first = run.first - first_key_, place = keeps_ ? first / run.step : rows_;
        keys_.find(first, run, false, place, keeps_, segment.key_rows, segment.key_stride);
        values_.find(first, run, values_.padded != values_.channels, place, keeps_, segment.value_rows, segment.value_stride);
        rows_ += run.count;
        return segment;
    }
    /// Asks for `queries` keys from position `key` on.
    void add_beyond(panel_ahead<T>& ahead, index key, index queries) const {
        const auto row = key - first_key_, count = std::min(queries, (key_count_ - row + step_ - 1) / step_);
        if (count <= 0) return;
        ahead.add({keys_.rows_from(row, step_), count, keys_.channels});
        ahead.add({values_.rows_from(row, step_), count, values_.channels});
    }
    /// Empties the tile.
    void clear() {
        rows_ = 0;
        segment_count_ = 0;
    }
    index rows() const { return rows_; }
    bool full() const { return rows_ == most || segment_count_ == most_segments; }
    std::span<const key_segment<T>> segments() const { return {segments_.data(), segment_count_}; }

private:
    /// The keys, or the values, of one head.
    struct side {
        side(detail::scratch& memory, index channel_count)
            : channels(channel_count), padded(whole_registers<T, Arch>(channels)), packed(memory.take<T>(most_kept * padded)) {}

        row_block<const T> rows_from(index row, index step) const {
            return {rows.data + row * rows.row_stride, rows.row_stride * step, rows.channel_stride};
        }
        /// Where the rows of a run that begins with row `first` can be read, at which stride: as they lie, or copied to rows `place` and
        /// on.
        void find(index first, const key_run& run, bool pads, index place, bool keeps, const T*& data, index& stride) {
            const auto own = rows_from(first, run.step);
            if (!pads && readable_in_place(own)) {
                data = own.data;
                stride = own.row_stride;
            } else {
                gather(own, place, run.count, keeps);
                data = packed + place * padded;
                stride = padded;
            }
        }
        /// Copies rows to their place, but for those that have been kept from an earlier panel.
        void gather(row_block<const T> from, index place, index count, bool keeps) {
            auto first = place;
            if (keeps) {
                first = kept;
                kept = std::max(kept, place + count);
                from.data += (first - place) * from.row_stride;
                count = kept - first;
            }
            if (count > 0) copy_rows<T, Arch>(from, count, channels, packed + first * padded, padded);
        }

        index channels, padded;
        T* packed;
        row_block<const T> rows{};
        index kept = 0; ///< rows of the residue class, from its first key
    };

    side keys_, values_;
    index first_key_ = 0, key_count_ = 0, residue_ = 0, step_ = 1;
    bool keeps_ = false;
    index rows_ = 0;
    std::size_t segment_count_ = 0;
    std::array<key_segment<T>, most_segments> segments_;
};

} // namespace attn::kernel
