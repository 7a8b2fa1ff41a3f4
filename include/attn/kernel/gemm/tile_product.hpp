// The micro-kernel of attention: a tile of sums that stays in registers while its depth goes by.
#pragma once

#include "../../core/tensor_view.hpp"
#include "matrix_tile.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// C = diag(scale) C + A B, or A B, or C + A B, on a few rows. A number of A is broadcast, a register of B is loaded, and C stays in
/// registers:
///     c(i, n) = scale[i] c(i, n) + sum over k < depth of a(i, k) b(k, n)
/// Each element is one chain of multiply-adds in the order of k, whatever tile computes it: so its bits are its own. A and B hold numbers
/// of T, or other operands E; B perhaps numbers as they are stored, which become operands as they are loaded. Rows of B and C are
/// contiguous.
template <Scalar T, class E = T, class B = E>
struct tile_product {
    row_block<const E> a;
    row_block<const B> b;
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
template <Scalar T, class E = T, class B = E>
void multiply(index_t rows, index_t columns, tile_product<T, E, B> p, auto& ahead) {
    using traits = tile_traits<T>;
    struct tiles_of {
        index_t tallest;
        std::array<void (*)(const tile_product<T, E, B>&), 5> rows; ///< the tallest, then 8, 4, 2, 1
    };
    constexpr auto of = []<int Columns>(std::integral_constant<int, Columns>) -> tiles_of {
        constexpr int tallest = std::same_as<B, E> ? traits::max_rows(Columns) : 4;
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
void multiply_wide(index_t rows, index_t registers, tile_product<T, E> p, auto& ahead) {
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
