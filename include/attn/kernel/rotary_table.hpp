// Rotary positions as a table of angles, and rows whose pairs of channels are turned by it.
#pragma once

#include "prefetch.hpp"
#include "transposed_columns.hpp"

#include <algorithm>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a pair of channels is turned by.
template <Scalar T>
struct cosine_and_sine {
    T cosine, sine;
};
/// A row, and where it goes, which may be itself: numbers so far apart.
template <Scalar T>
struct turned_row {
    const T* from;
    T* to;
    index_t from_stride, to_stride;
};

/// A view of the angles of rotary positions.
template <Scalar T>
struct rotary_table {
    const cosine_and_sine<T>* turns = nullptr; ///< [positions][pairs]
    index_t positions = 0, pairs = 0;          ///< pairs: those of an axis
    bool is_split = false;                     ///< of so many pairs in all, pair p is channels p and pairs + p; else 2p and 2p + 1

    /// Turns the pairs of one axis by those of a position. direction: 1, or -1 to turn back.
    void turn(const turned_row<T>& row, index_t position, index_t axis = 0, index_t axes = 1, T direction = 1) const {
        const auto apart = is_split ? axes * pairs : index_t{1}, step = is_split ? index_t{1} : index_t{2};
        const auto* const at_position = turns + position * pairs;
        for (index_t p = 0; p < pairs; ++p) {
            const auto left = (axis * pairs + p) * step, right = left + apart;
            const T a = row.from[left * row.from_stride], c = row.from[right * row.from_stride];
            const T sine = direction * at_position[p].sine;
            row.to[left * row.to_stride] = simd::multiply_add(a, at_position[p].cosine, -(c * sine));
            row.to[right * row.to_stride] = simd::multiply_add(a, sine, c * at_position[p].cosine);
        }
    }
    /// Turns rows that lie in columns[channel][stride], whole registers of them, row r by position + r, `count` of them: lanes are rows.
    void turn_columns(T* columns, index_t stride, index_t position, index_t count) const {
        using lanes = simd::lanes<T>;
        const auto apart = is_split ? pairs : index_t{1}, step = is_split ? index_t{1} : index_t{2};
        for (index_t row = 0; row < count; row += lanes::size) {
            lanes cosine;
            for_each_column<T, T>(&turns[(position + row) * pairs].cosine, 2 * pairs, std::min<index_t>(lanes::size, count - row),
                                  2 * pairs, no_prefetch(), [&](index_t c, const lanes& column) {
                                      if (c % 2 == 0) return static_cast<void>(cosine = column);
                                      T* const left = columns + c / 2 * step * stride + row;
                                      T* const right = left + apart * stride;
                                      const auto a = lanes::load(left), b = lanes::load(right);
                                      fma(a, cosine, -(b * column)).store(left);
                                      fma(a, column, b * cosine).store(right);
                                  });
        }
    }
};

/// How the rows of a sequence from a position on are turned when they are read: by their positions, without those before them that are
/// skipped.
template <Scalar T>
struct row_turns {
    rotary_table<T> table = {};
    std::span<const row_range> skipped = {}; ///< positions, in order
    index_t first = 0;                       ///< the position of row 0

    /// Whether they are turned at all.
    bool turn_rows() const { return table.pairs > 0; }
    /// f(j, place) for rows number row, row + step, ...: the position in the table of each.
    void for_each_place(index_t row, index_t count, index_t step, const auto& f) const {
        auto range = skipped.begin();
        index_t gone = 0;
        for (index_t j = 0; j < count; ++j) {
            const auto position = first + row + j * step;
            for (; range != skipped.end() && range->end() <= position; ++range) gone += range->count;
            f(j, (range == skipped.end() ? position : std::min(position, range->first)) - gone);
        }
    }
    /// The place of a row, if so many from it on have one after the other; else -1.
    index_t place_of_neighbours(index_t row, index_t count) const {
        index_t from = 0, to = 0;
        for_each_place(row, 1, 1, [&](index_t, index_t place) { from = place; });
        for_each_place(row + count - 1, 1, 1, [&](index_t, index_t place) { to = place; });
        return to - from == count - 1 ? from : -1;
    }
    /// Turns the numbers of rows row, row + step, ... where they lie. row_of(j): where those of the j-th begin, `stride` apart.
    void turn(index_t row, index_t count, index_t step, index_t stride, const auto& row_of) const {
        for_each_place(row, count, step, [&](index_t j, index_t place) {
            T* const numbers = row_of(j);
            table.turn({numbers, numbers, stride, stride}, place);
        });
    }
};

} // namespace attn::kernel
