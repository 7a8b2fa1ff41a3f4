// The mergeable state of linear attention: what all keys seen so far leave behind.
#pragma once

#include "../../core/inputs.hpp"
#include "../../core/workspace.hpp"
#include "../../simd/wide_sum.hpp"
#include "../gemm/matrix_tile.hpp"
#include "../prefetch.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Covers [0, count) with tiles of so many columns and calls f(std::integral_constant<int, Rows>, first row). Few sizes, for each is a
/// kernel of its own: the last tile may reach past the count, up to a multiple of 4, where memory must be there.
template <int Columns, Scalar T, class F>
[[gnu::always_inline]] inline void for_each_rows(index_t count, F&& f) {
    constexpr int max_rows = tile_traits<T>::max_rows(Columns), lower = max_rows > 8 ? 8 : 4;
    index_t row = 0;
    while (row < count) {
        const auto left = count - row;
        const auto call = [&]<int Rows>(std::integral_constant<int, Rows> rows) {
            f(rows, row);
            row += Rows;
        };
        if (left >= max_rows + 4 || (left <= max_rows && left > std::max(lower, max_rows - 4)))
            call(std::integral_constant<int, max_rows>{});
        else if (left > 4 && lower > 4) call(std::integral_constant<int, lower>{});
        else call(std::integral_constant<int, 4>{});
    }
}

/// Covers [0, count) rows of `registers` with tiles of at most `wide` registers and calls f(rows, columns, first row, first register): how
/// many rows and columns are integral constants.
template <Scalar T>
[[gnu::always_inline]] inline void for_each_tile(index_t count, index_t registers, int wide, const auto& f) {
    for_each_piece(registers, wide, [&](index_t reg, index_t width) {
        with_constant<tile_traits<T>::max_columns>(
            width, [&](auto columns) { for_each_rows<columns(), T>(count, [&](auto rows, index_t row) { f(rows, columns, row, reg); }); });
    });
}

/// The features of some tokens, rows of `stride` numbers: whole registers, the last filled up with zeros. What is written there is still
/// to be mapped by phi.
template <Scalar T, class Phi = std::identity>
struct feature_rows {
    const T* data;
    index_t count, stride;
    [[no_unique_address]] Phi phi = {};
};

/// Where rows of results go: out[r] = (start[r] + phi(q_r) S) * factor[r] + local[r]. `start` and `local` may be null.
template <Scalar T>
struct linear_result {
    stored_rows<T> out;
    index_t channels;
    const T* factor;
    const T *start, *local; ///< rows of `padded` numbers
};

/// (S, z) of the keys seen so far:
///     S = sum_j phi(k_j)^T v_j   (d_k, d_v),      z = sum_j phi(k_j)   (d_k)
/// An empty one is zero, and two of disjoint keys merge by addition. Each block of keys is summed by itself before it is added, so
/// that a million keys round little more than a thousand.
template <Scalar T>
struct linear_state {
    using lanes = simd::lanes<T>;
    using traits = tile_traits<T>;

    index_t key_channels = 0;
    index_t key_padded = 0, padded = 0; ///< d_k and d_v in whole registers
    T* sums = nullptr;                  ///< S [key_padded][padded]
    T* key_sum = nullptr;               ///< z [key_padded]

    static linear_state take(detail::scratch& memory, index_t key_channels, index_t value_channels) {
        linear_state state{key_channels, whole(key_channels), whole_registers<T>(value_channels)};
        state.sums = memory.take<T>(state.key_padded, state.padded);
        state.key_sum = memory.take<T>(state.key_padded);
        return state;
    }
    /// Channels in whole registers, and in whole tiles of rows.
    static constexpr index_t whole(index_t channels) {
        constexpr index_t unit = std::max(lanes::size, 4);
        return (channels + unit - 1) / unit * unit;
    }
    /// Whether the micro-kernels apply an idempotent map to what they read. Beside four registers of values this is free, but a number is
    /// read once for each tile's width of them: beside two, a pass that writes the features costs less.
    static constexpr bool maps_on_reading(index_t padded) {
        constexpr int columns = traits::max_columns;
        return columns == 4 && padded % (columns * lanes::size) == 0;
    }
    void reset() const {
        std::fill_n(sums, key_padded * padded, T{0});
        std::fill_n(key_sum, key_padded, T{0});
    }
    /// Takes keys in: values are rows of `padded` numbers.
    template <class Phi>
    void push(const feature_rows<T, Phi>& keys, const T* values, index_t value_stride, auto& ahead) const {
        add_features(keys);
        for_each_tile<T>(key_channels, padded / lanes::size, traits::max_columns, [&](auto rows, auto columns, index_t row, index_t reg) {
            const auto channel = reg * lanes::size;
            add_products<rows(), columns()>(as_read<columns()>(keys), row, values + channel, value_stride, channel, ahead);
        });
    }
    void merge(const linear_state& other) const {
        const auto add = [](T* to, const T* from, index_t count) {
            for (index_t e = 0; e < count; e += lanes::size) (lanes::load(to + e) + lanes::load(from + e)).store(to + e);
        };
        add(sums, other.sums, key_padded * padded);
        add(key_sum, other.key_sum, key_padded);
    }
    /// to[r] += phi(q_r) . z, for rows up to a whole register of them; those beyond the last hold nothing of use.
    template <class Phi>
    void add_denominators(const feature_rows<T, Phi>& queries, T* to) const {
        constexpr int at_once =
            std::max(1, lanes::size / simd::wide_sum<T>::parts); // rows, whose sums are as many registers as one has numbers
        for (index_t first = 0; first < queries.count; first += lanes::size) {
            lanes sum[lanes::size];
            for (int from = 0; from < lanes::size; from += at_once) {
                simd::wide_sum<T> products[std::size_t{at_once}];
                simd::for_each_part<T>(key_padded, [&](index_t c, auto part, index_t) {
                    const auto z = lanes::load(key_sum + c);
                    const T* row = queries.data + (first + from) * queries.stride + c; // not an address for each row, as below
#pragma GCC unroll 16
                    for (int r = 0; r < at_once; ++r, row += queries.stride) products[r].add(part, queries.phi(lanes::load(row)), z);
                });
#pragma GCC unroll 16
                for (int r = 0; r < at_once; ++r) sum[from + r] = products[r].folded();
            }
            (lanes::load(to + first) + simd::sum_each<T>(sum)).store(to + first);
        }
    }
    /// Ends a chunk of queries. spare: room for a tile of rows, which go there first if some are past the last, or they are not stored in
    /// whole registers of T.
    template <class Phi>
    void finish(const feature_rows<T, Phi>& queries, const linear_result<T>& result, T* spare, auto& ahead) const {
        for_each_tile<T>(queries.count, padded / lanes::size, traits::max_columns, [&](auto rows, auto columns, index_t row, index_t reg) {
            const index_t channel = reg * lanes::size, wide = columns() * lanes::size;
            const auto present = std::min<index_t>(queries.count - row, rows()), there = std::min(wide, result.channels - channel);
            const auto out = result.out.from(row, channel);
            const bool in_place = present == rows() && there == wide && !out.is_narrow() && out.channel_stride == 1;
            finish_rows<rows(), columns()>(as_read<columns()>(queries), row, channel, result, in_place ? out.numbers().data : spare,
                                           in_place ? out.row_stride : padded, ahead);
            if (!in_place) store_rows<T>(spare, padded, present, there, out);
        });
    }

private:
    /// Rows of features as a tile of so many columns reads them: of narrower tiles there is one instance for all maps.
    template <int Columns, class Phi>
    static auto as_read(const feature_rows<T, Phi>& rows) {
        if constexpr (maps_on_reading(Columns * lanes::size)) return rows;
        else return feature_rows<T>{rows.data, rows.count, rows.stride};
    }

    /// z += sum of features; four chains of additions, or eight, do not wait for each other.
    template <class Phi>
    void add_features(const feature_rows<T, Phi>& keys) const {
        for_each_piece(key_padded / lanes::size, 4, [&](index_t first, index_t columns) {
            with_constant<4>(columns, [&]<int Columns>(std::integral_constant<int, Columns>) {
                lanes even[std::size_t{Columns}], odd[std::size_t{Columns}];
#pragma GCC unroll 4
                for (int i = 0; i < Columns; ++i) even[i] = odd[i] = lanes(T{0});
                const T* row = keys.data + first * lanes::size;
                index_t j = 0;
                for (; j + 1 < keys.count; j += 2, row += 2 * keys.stride)
#pragma GCC unroll 4
                    for (int i = 0; i < Columns; ++i) {
                        even[i] += keys.phi(lanes::load(row + i * lanes::size));
                        odd[i] += keys.phi(lanes::load(row + keys.stride + i * lanes::size));
                    }
#pragma GCC unroll 4
                for (int i = 0; i < Columns; ++i) {
                    T* const at = key_sum + (first + i) * lanes::size;
                    if (j < keys.count) even[i] += keys.phi(lanes::load(row + i * lanes::size));
                    (lanes::load(at) + (even[i] + odd[i])).store(at);
                }
            });
        });
    }
    /// Terms of a tile between which lines are asked for: so few lines at once that loads hardly wait for them, so many terms that the ends
    /// of these loops do not count.
    template <int Rows, int Columns>
    static constexpr index_t terms_between = 384 / (Rows * Columns);

    /// Some rows of S: rows are key channels.
    template <int Rows, int Columns, class Phi>
    [[gnu::noinline]] void add_products(const feature_rows<T, Phi>& keys, index_t row, const T* values, index_t value_stride,
                                        index_t channel, auto& ahead) const {
        matrix_tile<Rows, Columns, T> tile;
        tile.zero();
        const T* k = keys.data + row;
        constexpr auto terms = terms_between<Rows, Columns>;
        for (index_t left = keys.count; left > 0; left -= terms) {
            ahead.beside(Rows * Columns * terms);
            tile.multiply_add(k, unit_stride{}, keys.stride, values, value_stride, std::min(terms, left), keys.phi);
            k += terms * keys.stride;
            values += terms * value_stride;
        }
        tile.add_to(sums + row * padded + channel, padded);
    }
    template <int Rows, int Columns, class Phi>
    [[gnu::noinline]] void finish_rows(const feature_rows<T, Phi>& queries, index_t row, index_t channel, const linear_result<T>& result,
                                       T* out, index_t out_stride, auto& ahead) const {
        matrix_tile<Rows, Columns, T> tile;
        if (result.start) tile.load(result.start + row * padded + channel, padded);
        else tile.zero();
        const T *x = queries.data + row * queries.stride, *s = sums + channel;
        constexpr auto terms = terms_between<Rows, Columns>;
        for (index_t left = key_channels; left > 0; left -= terms) {
            ahead.beside(Rows * Columns * terms);
            tile.multiply_add(x, queries.stride, unit_stride{}, s, padded, std::min(terms, left), queries.phi);
            x += terms;
            s += terms * padded;
        }
        // Row after row: gcc would keep the addresses of all of them in vector registers.
        const T *factor = result.factor + row, *local = result.local ? result.local + row * padded + channel : nullptr;
        if (local) {
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i, out += out_stride, local += padded)
#pragma GCC unroll 4
                for (int c = 0; c < Columns; ++c)
                    fma(tile.sum[i][c], lanes(factor[i]), lanes::load(local + c * lanes::size)).store(out + c * lanes::size);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i, out += out_stride)
#pragma GCC unroll 4
                for (int c = 0; c < Columns; ++c) (tile.sum[i][c] * lanes(factor[i])).store(out + c * lanes::size);
        }
    }
};

} // namespace attn::kernel
