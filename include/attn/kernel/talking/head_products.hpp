// The gradients of a mixing of heads: sums over the pairs of a tile.
#pragma once

#include "../../simd/wide_sum.hpp"
#include "head_mixing.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// sums[row * columns + column] += sum over the pairs of a block of a[row] b[column], numbers of all pairs in so many heads.
template <Scalar T>
void add_head_products(const head_block& block, const T* a, index_t rows, const T* b, index_t columns, double* sums) {
    using lanes = simd::lanes<T>;
    constexpr index_t side = simd::wide_sum<T>::parts == 1 ? 4 : 2; // of a square of sums in registers
    const auto queries = block.registers * lanes::size;
    for (index_t row = 0; row < rows; row += side)
        for (index_t column = 0; column < columns; column += side) {
            const T *of_row[std::size_t{side}], *of_column[std::size_t{side}];
            for (index_t s = 0; s < side; ++s) { // beyond the last head it is taken again
                of_row[s] = a + std::min(row + s, rows - 1) * block.head_stride;
                of_column[s] = b + std::min(column + s, columns - 1) * block.head_stride;
            }
            simd::wide_sum<T> square[std::size_t{side}][std::size_t{side}];
            for (index_t key = 0; key < block.keys; ++key)
                simd::for_each_part<T>(queries, [&](index_t q, auto part, index_t) {
                    const auto x = key * queries + q;
                    lanes right[std::size_t{side}];
#pragma GCC unroll 4
                    for (index_t c = 0; c < side; ++c) right[c] = lanes::load(of_column[c] + x);
#pragma GCC unroll 4
                    for (index_t r = 0; r < side; ++r) {
                        const auto left = lanes::load(of_row[r] + x);
#pragma GCC unroll 4
                        for (index_t c = 0; c < side; ++c) square[r][c].add(part, left, right[c]);
                    }
                });
            for (index_t r = 0; r < std::min(side, rows - row); ++r)
                for (index_t c = 0; c < std::min(side, columns - column); ++c)
                    sums[(row + r) * columns + column + c] += static_cast<double>(square[r][c].total());
        }
}

/// sums[row] += sum over the pairs of a block of a[row].
template <Scalar T>
void add_head_sums(const head_block& block, const T* a, index_t rows, double* sums) {
    using lanes = simd::lanes<T>;
    for (index_t row = 0; row < rows; ++row) {
        const T* const from = a + row * block.head_stride;
        const auto queries = block.registers * lanes::size;
        simd::wide_sum<T> all;
        for (index_t key = 0; key < block.keys; ++key)
            simd::for_each_part<T>(queries, [&](index_t q, auto part, index_t) { all.add(part, lanes::load(from + key * queries + q)); });
        sums[row] += static_cast<double>(all.total());
    }
}

} // namespace attn::kernel
