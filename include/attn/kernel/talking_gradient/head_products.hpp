// The gradients of a mixing of heads: sums over the pairs of a tile.
#pragma once

#include "../talking/head_mixing.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// sums[row * columns + column] += sum over the pairs of a block of a[row] b[column], numbers of all pairs in so many heads.
template <Scalar T>
void add_head_products(const head_block& block, const T* a, index_t rows, const T* b, index_t columns, double* sums) {
    using lanes = simd::lanes<T>;
    constexpr index_t side = 4; // of a square of sums in registers
    const auto numbers = block.keys * block.registers * lanes::size;
    for (index_t row = 0; row < rows; row += side)
        for (index_t column = 0; column < columns; column += side) {
            const T *of_row[side], *of_column[side];
            for (index_t s = 0; s < side; ++s) { // beyond the last head it is taken again
                of_row[s] = a + std::min(row + s, rows - 1) * block.head_stride;
                of_column[s] = b + std::min(column + s, columns - 1) * block.head_stride;
            }
            lanes square[side][side];
#pragma GCC unroll 4
            for (index_t r = 0; r < side; ++r)
#pragma GCC unroll 4
                for (index_t c = 0; c < side; ++c) square[r][c] = lanes(T{0});
            for (index_t x = 0; x < numbers; x += lanes::size) {
                lanes right[side];
#pragma GCC unroll 4
                for (index_t c = 0; c < side; ++c) right[c] = lanes::load(of_column[c] + x);
#pragma GCC unroll 4
                for (index_t r = 0; r < side; ++r) {
                    const auto left = lanes::load(of_row[r] + x);
#pragma GCC unroll 4
                    for (index_t c = 0; c < side; ++c) square[r][c] = fma(left, right[c], square[r][c]);
                }
            }
            for (index_t r = 0; r < std::min(side, rows - row); ++r)
                for (index_t c = 0; c < std::min(side, columns - column); ++c)
                    sums[(row + r) * columns + column + c] += static_cast<double>(sum(square[r][c]));
        }
}

/// sums[row] += sum over the pairs of a block of a[row].
template <Scalar T>
void add_head_sums(const head_block& block, const T* a, index_t rows, double* sums) {
    using lanes = simd::lanes<T>;
    for (index_t row = 0; row < rows; ++row) {
        const T* const from = a + row * block.head_stride;
        lanes all = T{0};
        for (index_t x = 0; x < block.keys * block.registers * lanes::size; x += lanes::size) all = all + lanes::load(from + x);
        sums[row] += static_cast<double>(sum(all));
    }
}

} // namespace attn::kernel
