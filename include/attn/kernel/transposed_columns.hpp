// A register of rows, one channel after the other: squares of numbers are transposed in registers.
#pragma once

#include "../simd/narrow_pairs.hpp"
#include "tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Calls put(c, register of operand c of each row) for the channels c < depth in order. Of `count` rows, at most a register of them, the
/// last stands for those that are not there. Rows hold operands E, or 16-bit numbers. ahead: is told of the multiply-adds that a square
/// gives time for.
template <Scalar T, class E, class V>
[[gnu::always_inline]] inline void for_each_column(const V* first_row, index_t row_stride, index_t count, index_t depth, auto&& ahead,
                                                   const auto& put) {
    using operand = simd::operand_lanes<E>;
    using read = simd::operand_lanes<V>;
    constexpr int size = simd::lanes<T>::size;
    const V* rows[std::size_t{size}];
#pragma GCC unroll 16
    for (int j = 0; j < size; ++j) rows[j] = first_row + std::min<index_t>(j, count - 1) * row_stride;
    const auto transpose = [&](auto* square) __attribute__((always_inline)) {
        ahead.beside(16 * size * simd::terms_of<E>);
        simd::transpose<T>(square);
        ahead.beside(16 * size * simd::terms_of<E>); // a row of keys and one of values for each of these
    };
    index_t c = 0;
    if constexpr (Narrow<V>) { // pairs of them take half the shuffles
        for (; c + 2 * size <= depth; c += 2 * size) {
            simd::narrow_pairs<narrow_format_of<V>> pairs[std::size_t{size}];
#pragma GCC unroll 16
            for (int j = 0; j < size; ++j) pairs[j] = pairs[j].load(rows[j] + c);
            transpose(pairs);
#pragma GCC unroll 16
            for (int i = 0; i < size; ++i) {
                put(c + 2 * i, operand(pairs[i].first()));
                put(c + 2 * i + 1, operand(pairs[i].second()));
            }
        }
    }
    for (; c + size <= depth; c += size) {
        operand square[std::size_t{size}];
#pragma GCC unroll 16
        for (int j = 0; j < size; ++j) square[j] = read::load(rows[j] + c);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < size; ++i) put(c + i, square[i]);
    }
    if (const auto rest = depth - c; rest > 0) {
        operand square[std::size_t{size}];
#pragma GCC unroll 16
        for (int j = 0; j < size; ++j) square[j] = read::load_first(rows[j] + c, rest);
        simd::transpose<T>(square);
        E columns[std::size_t{size * size}];
        for (int i = 0; i < size; ++i) square[i].store(columns + i * size);
        for (index_t i = 0; i < rest; ++i) put(c + i, operand::load(columns + i * size));
    }
}

} // namespace attn::kernel
