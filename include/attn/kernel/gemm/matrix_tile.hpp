// The micro-kernel, which every matrix product of the library runs through: a tile of sums that stays in registers while its depth goes by.
#pragma once

#include "../../core/tensor_view.hpp"
#include "../../simd/lanes.hpp"
#include "../../simd/unroll.hpp"

#include <array>
#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How the registers of an instruction set shape the micro-kernel.
template <Scalar T>
struct tile_traits {
    static constexpr int lane_count = simd::lanes<T>::size;
    /// Columns of a tile, in registers: of 32 registers 24 accumulate, as 6 x 4 or 8 x 3; of 16 registers 12, as 6 x 2.
    static constexpr int max_columns = simd::register_count >= 32 ? 4 : 2;
    /// Rows of a tile of that many columns. More than 24 accumulators spill on clang; fewer than 8 wait for each other.
    static constexpr int max_rows(int columns) {
        constexpr int of_32[] = {16, 12, 8, 6}, of_16[] = {8, 6};
        return simd::register_count >= 32 ? of_32[columns - 1] : of_16[columns - 1];
    }
};

/// A stride that is known to be one, so that the micro-kernel addresses without multiplying.
using unit_stride = std::integral_constant<index_t, 1>;

/// A register of operands that begins so many numbers after one.
template <class B>
[[gnu::always_inline]] inline auto load_operands(const B* from, index_t after) {
    return simd::operand_lanes<B>::load(from + after);
}

/// Rows x Columns registers of sums.
template <int Rows, int Columns, Scalar T>
struct matrix_tile {
    using lanes = simd::lanes<T>;
    lanes sum[static_cast<std::size_t>(Rows)][static_cast<std::size_t>(Columns)];

    [[gnu::always_inline]] void zero() {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) sum[i][c] = lanes(T{0});
    }
    [[gnu::always_inline]] void load(const T* from, index_t row_stride) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i, from += row_stride)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) sum[i][c] = lanes::load(from + c * lanes::size);
    }
    /// Row i begins as factor[i] times what lies at from + i * row_stride.
    [[gnu::always_inline]] void load(const T* from, index_t row_stride, const T* factor) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i, from += row_stride)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) sum[i][c] = lanes::load(from + c * lanes::size) * lanes(factor[i]);
    }
    [[gnu::always_inline]] void store(T* to, index_t row_stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i, to += row_stride)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) sum[i][c].store(to + c * lanes::size);
    }
    [[gnu::always_inline]] void add_to(T* to, index_t row_stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i, to += row_stride)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) (lanes::load(to + c * lanes::size) + sum[i][c]).store(to + c * lanes::size);
    }
    /// sum[i][c] += sum over k < depth of phi(a(i, k)) * b(k, c), where a(i, k) = a[i * a_row + k * a_depth] is a number and b(k, c) the
    /// register at b + k * b_depth + c * lanes::size, both of T or of other operands; b perhaps of numbers that become operands as they are
    /// loaded (load_operands). Each lane is one chain of multiply-adds in the order of k: its result is the same in a tile of any size.
    /// Rows are addressed as they are: with a pointer for every three of them clang keeps these in vector registers, and sums in memory.
    template <class E, class Phi = std::identity>
    [[gnu::always_inline]] void multiply_add(const E* a, auto a_row, auto a_depth, auto b, index_t b_depth, index_t depth,
                                             const Phi& phi = {}) {
        using operand = simd::operand_lanes<E>;
        for (; depth > 0; --depth, a += a_depth, b += b_depth) {
            operand right[std::size_t{Columns}];
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) right[c] = load_operands(b, c * lanes::size);
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i) {
                const operand left = phi(operand(a[i * a_row]));
#pragma GCC unroll 8
                for (int c = 0; c < Columns; ++c) sum[i][c] = fma(left, right[c], sum[i][c]);
                simd::load_in_order();
            }
        }
    }
};

/// Calls f(std::integral_constant<int, n>) for a run-time n in [1, Max].
template <int Max, class F>
[[gnu::always_inline]] inline void with_constant(index_t n, F&& f) {
    [&]<int... Index>(std::integer_sequence<int, Index...>) {
        static_cast<void>(((n == Index + 1 && (f(std::integral_constant<int, Index + 1>{}), true)) || ...));
    }(std::make_integer_sequence<int, Max>{});
}

/// Cuts [0, count) into pieces of at most `max_size`, as even as they come, and calls f(first, size, pieces) for those of each size,
/// which follow each other: a tail of one row would leave the micro-kernel waiting for its own adders.
[[gnu::always_inline]] inline void for_each_size(index_t count, index_t max_size, const auto& f) {
    if (count <= 0) return;
    const auto pieces = (count + max_size - 1) / max_size, larger = count % pieces;
    index_t size = count / pieces, same = pieces - larger;
    for (index_t first = 0; first < count; first += size * same, ++size, same = larger) f(first, size, same);
}
/// Cuts [0, count) into pieces of at most `max_size`, as even as they come, and calls f(first, size) for each piece.
[[gnu::always_inline]] inline void for_each_piece(index_t count, index_t max_size, const auto& f) {
    for_each_size(count, max_size, [&](index_t first, index_t size, index_t pieces) {
        for (; pieces > 0; --pieces, first += size) f(first, size);
    });
}

/// C = diag(scale) C + A B, or A B, or C + A B, on a few rows. A number of A is broadcast, a register of B is loaded, and C stays in
/// registers:
///     c(i, n) = scale[i] c(i, n) + sum over k < depth of a(i, k) b(k, n)
/// Each element is one chain of multiply-adds in the order of k, whatever tile computes it: so its bits are its own. A and B hold numbers
/// of T, or other operands E; B perhaps numbers as they are stored, which become operands as they are loaded. Rows of B and C are
/// contiguous. B: the rows of the right operand.
template <Scalar T, class E = T, class B = row_block<const E>>
struct tile_product {
    row_block<const E> a;
    B b;
    index_t depth;
    row_block<T> c;
    const T* scale = nullptr; ///< one number a row; none: C begins as 0, and is not read,
    bool adds = false;        ///< or as it is

    /// Goes on to the product of the rows from row `rows` on.
    void skip(index_t rows) {
        a = a.from(rows);
        c = c.from(rows);
        if (scale) scale += rows;
    }
};

/// Rows x Columns registers of the product.
template <int Rows, int Columns, Scalar T, class E, class B>
[[gnu::noinline]] void multiply_tile(const tile_product<T, E, B>& p) {
    matrix_tile<Rows, Columns, T> tile;
    if (p.scale) tile.load(p.c.data, p.c.row_stride, p.scale);
    else if (p.adds) tile.load(p.c.data, p.c.row_stride);
    else tile.zero();
    tile.multiply_add(p.a.data, p.a.row_stride, p.a.channel_stride, p.b.data, p.b.row_stride, p.depth);
    tile.store(p.c.data, p.c.row_stride);
}

/// The product on any number of rows, of `columns` registers, 1 to max_columns: the tallest tile as often as it fits, then smaller ones.
/// ahead: what comes next is asked for between tiles. Numbers that become operands as they are loaded are for few rows, and so are their
/// tiles.
template <Scalar T, class E = T, class B = row_block<const E>>
void multiply(index_t rows, index_t columns, tile_product<T, E, B> p, auto& ahead) {
    using traits = tile_traits<T>;
    struct tiles_of {
        index_t tallest;
        std::array<void (*)(const tile_product<T, E, B>&), 5> rows; ///< the tallest, then 8, 4, 2, 1
    };
    constexpr auto of = []<int Columns>(std::integral_constant<int, Columns>) -> tiles_of {
        constexpr int tallest = std::same_as<B, row_block<const E>> ? traits::max_rows(Columns) : 4;
        return {tallest,
                {multiply_tile<tallest, Columns, T, E, B>, multiply_tile<(tallest > 8 ? 8 : 4), Columns, T, E, B>,
                 multiply_tile<4, Columns, T, E, B>, multiply_tile<2, Columns, T, E, B>, multiply_tile<1, Columns, T, E, B>}};
    };
    static constexpr auto table = [of]<int... C>(std::integer_sequence<int, C...>) {
        return std::array{of(std::integral_constant<int, C + 1>{})...};
    }(std::make_integer_sequence<int, traits::max_columns>{});
    const auto& tiles = table[static_cast<std::size_t>(columns - 1)];
    const auto take = [&](std::size_t t, index_t height) {
        tiles.rows[t](p);
        p.skip(height);
        rows -= height;
        ahead.beside(height * columns * p.depth);
    };
    while (rows >= tiles.tallest) take(0, tiles.tallest);
    std::size_t smaller = 1;
    for (const index_t height : {8, 4, 2, 1}) {
        if (rows >= height) take(smaller, height);
        ++smaller;
    }
}

/// The product with any number of registers side by side, in pieces as even as they come.
template <Scalar T, class E = T>
void multiply_wide(index_t rows, index_t registers, tile_product<T, E> p, auto&& ahead) {
    constexpr index_t wide = tile_traits<T>::max_columns, lane_count = simd::lanes<T>::size;
    const auto b = p.b;
    const auto c = p.c;
    for_each_piece(registers, wide, [&](index_t left, index_t columns) {
        p.b = b.from(0, left * lane_count);
        p.c = c.from(0, left * lane_count);
        multiply<T, E>(rows, columns, p, ahead);
    });
}

} // namespace attn::kernel
