// Tiles of recurrent attention: what some rows of vectors read from a state, and the values that correct it.
#pragma once

#include "../../simd/unroll.hpp"
#include "../gemm/matrix_tile.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Tokens of a chunk: the state grows once for so many. Their pairs cost chunk / 2 (d_k + d_v) products a token where the state takes 2 d_k
/// d_v, and the state is read and written once a chunk.
inline constexpr index_t recurrent_chunk = 16;

/// Values of a chunk's tokens, rows that lie `stride` apart, and their weights in some rows, recurrent_chunk numbers each. Row 0 sees the
/// first `seen` of them.
template <Scalar T>
struct weighted_values {
    const T* weights;
    const T* values;
    index_t stride, seen;

    /// Those of the rows from one on, which sees so many, and of the columns from one on.
    weighted_values from(index_t row, index_t more, index_t channel) const {
        return {weights + row * recurrent_chunk, values + channel, stride, seen + more};
    }
};

/// Rows of vectors x_r that read a state S, and with it values of a chunk's tokens:
///     y_r = factor_r x_r S + sum over terms and over j < seen_r of weight_rj value_j
/// Each is one chain of multiply-adds: over the channels in order, then over the tokens of one term after the other.
template <Scalar T>
struct recurrent_rows {
    row_block<const T> vectors;
    const T* factors; ///< null: of 1
    std::span<const weighted_values<T>> terms;
    bool alike; ///< seen_r is that of row 0, or one more for each row
};

/// What a solution z_r = beta_r (v_r - y_r) is made of, or z_r = -y_r. Its rows weigh in those behind them; their strides are the weights'.
template <Scalar T>
struct corrected_values {
    weighted_values<T> own;
    const T* beta;   ///< null: -y
    const T* values; ///< of all rows
    T* solution;
    T* difference = nullptr; ///< where v - y goes, if it is wanted
};

/// Some columns of a state: key_channels rows, `stride` apart.
template <Scalar T>
struct state_columns {
    const T* sums;
    index_t key_channels, stride;
};

/// Rows x Columns registers of what rows read.
template <int Rows, int Columns, Scalar T>
struct recurrent_tile {
    using lanes = simd::lanes<T>;
    matrix_tile<Rows, Columns, T> tile;

    /// What the rows from one on read, in the columns from one on.
    [[gnu::always_inline]] void read(const recurrent_rows<T>& rows, const state_columns<T>& s, index_t row, index_t channel) {
        tile.zero();
        const auto vectors = rows.vectors.from(row);
        tile.multiply_add(vectors.data, vectors.row_stride, vectors.channel_stride, s.sums + channel, s.stride, s.key_channels);
        if (rows.factors)
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int c = 0; c < Columns; ++c) tile.sum[r][c] *= lanes(rows.factors[row + r]);
        for (const auto& term : rows.terms) add(term.from(row, rows.alike ? 0 : row, channel), rows.alike);
    }
    /// Adds the values that all rows see, and those that only later rows do.
    [[gnu::always_inline]] void add(const weighted_values<T>& w, bool alike) {
        tile.multiply_add(w.weights, recurrent_chunk, unit_stride{}, w.values, w.stride, w.seen);
        if (alike) return;
        simd::unroll<Rows - 1>([&](auto s) __attribute__((always_inline)) {
            lanes value[std::size_t{Columns}];
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) value[c] = lanes::load(w.values + (w.seen + s()) * w.stride + c * lanes::size);
            add_later<s()>(w.weights + w.seen, value);
        });
    }
    /// Adds the value of the token that row `First` stands for to the rows behind it. weights: of row 0, from that of its own token on.
    template <int First>
    [[gnu::always_inline]] void add_later(const T* weights, const lanes* value) {
#pragma GCC unroll 16
        for (int r = First + 1; r < Rows; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) tile.sum[r][c] = fma(lanes(weights[r * recurrent_chunk + First]), value[c], tile.sum[r][c]);
    }
    /// The rows of z one after the other, each beside those before it.
    [[gnu::always_inline]] void solve(const corrected_values<T>& by, index_t row, index_t channel) {
        const auto own = by.own.from(row, row, channel);
        const auto begin = row * own.stride + channel;
        tile.multiply_add(own.weights, recurrent_chunk, unit_stride{}, own.values, own.stride, own.seen);
        simd::unroll<Rows>([&](auto s) __attribute__((always_inline)) {
            lanes z[std::size_t{Columns}];
#pragma GCC unroll 8
            for (int c = 0; c < Columns; ++c) {
                const auto at = begin + s() * own.stride + c * lanes::size;
                z[c] = -tile.sum[s()][c];
                if (by.beta) {
                    const auto difference = lanes::load(by.values + at) - tile.sum[s()][c];
                    if (by.difference) difference.store(by.difference + at);
                    z[c] = lanes(by.beta[row + s()]) * difference;
                }
                z[c].store(by.solution + at);
            }
            add_later<s()>(own.weights + own.seen, z);
        });
    }
};

template <int Rows, int Columns, Scalar T>
[[gnu::noinline]] void read_tile(const recurrent_rows<T>& rows, const state_columns<T>& s, index_t row, index_t channel, T scale, T* out,
                                 index_t out_stride) {
    recurrent_tile<Rows, Columns, T> t;
    t.read(rows, s, row, channel);
    simd::unroll<Rows, Columns>([&](auto r, auto c) { t.tile.sum[r][c] *= simd::lanes<T>(scale); });
    t.tile.store(out, out_stride);
}
template <int Rows, int Columns, Scalar T>
[[gnu::noinline]] void solve_tile(const recurrent_rows<T>& rows, const state_columns<T>& s, index_t row, index_t channel,
                                  const corrected_values<T>& by) {
    recurrent_tile<Rows, Columns, T> t;
    t.read(rows, s, row, channel);
    t.solve(by, row, channel);
}

/// Calls f(rows, columns, row, register) for the tiles that so many rows and registers fall into, powers of two but for the tallest of the
/// widest: how many rows and columns are integral constants. All rows of some columns come in order. One row alone, a step of decoding, has
/// eight columns: fewer sums would wait for themselves.
template <Scalar T>
[[gnu::always_inline]] inline void for_each_recurrent_tile(index_t count, index_t registers, const auto& f) {
    constexpr int widest = tile_traits<T>::max_columns;
    index_t reg = 0;
    for (; count == 1 && reg + 8 <= registers; reg += 8)
        f(std::integral_constant<int, 1>{}, std::integral_constant<int, 8>{}, index_t{0}, reg);
    const auto columns_of = [&]<int Columns>(std::integral_constant<int, Columns> columns) {
        constexpr int tallest = std::min(tile_traits<T>::max_rows(Columns), 8);
        for (; reg + Columns <= registers; reg += Columns) {
            index_t row = 0;
            const auto rows_of = [&](auto rows) {
                for (; row + rows() <= count; row += rows()) f(rows, columns, row, reg);
            };
            rows_of(std::integral_constant<int, tallest>{});
            rows_of(std::integral_constant<int, 4>{});
            rows_of(std::integral_constant<int, 2>{});
            rows_of(std::integral_constant<int, 1>{});
        }
    };
    if constexpr (widest > 2) columns_of(std::integral_constant<int, 4>{});
    columns_of(std::integral_constant<int, 2>{});
    columns_of(std::integral_constant<int, 1>{});
}

/// The solution of so many rows.
template <Scalar T>
void solve(index_t count, const recurrent_rows<T>& rows, const state_columns<T>& s, const corrected_values<T>& by, auto&& ahead) {
    for_each_recurrent_tile<T>(count, s.stride / simd::lanes<T>::size, [&](auto height, auto columns, index_t row, index_t reg) {
        ahead.beside(height() * columns() * s.key_channels);
        solve_tile<height(), columns(), T>(rows, s, row, reg * simd::lanes<T>::size, by);
    });
}

} // namespace attn::kernel
