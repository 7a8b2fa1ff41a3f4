// Brings tiles of strided memory into the layouts that the micro-kernel reads.
#pragma once

#include "../core/tensor_view.hpp"
#include "../simd/transpose.hpp"

#include <algorithm>
#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// So many numbers that they fill whole registers.
template <Scalar T, class Arch>
constexpr index_t whole_registers(index_t count) {
    return (count + simd::lanes<T, Arch>::size - 1) / simd::lanes<T, Arch>::size * simd::lanes<T, Arch>::size;
}

/// Rows of channels: row r begins at data + r * row_stride.
template <class T>
struct row_block {
    T* data;
    index_t row_stride;
    index_t channel_stride;
};

/// The rows of one batch entry and head, from one of them on.
template <class T>
row_block<T> rows_of(const tensor_view<T>& tensor, index_t batch, index_t head, index_t first = 0) {
    return {tensor.row(batch, head, first), tensor.strides().tokens, tensor.strides().channels};
}

/// True if the micro-kernel should read the rows where they lie. Rows a multiple of 4 KiB apart share the sets of the first-level cache and
/// evict each other.
template <class T>
bool readable_in_place(const row_block<T>& rows) {
    return rows.channel_stride == 1 && rows.row_stride * static_cast<index_t>(sizeof(T)) % 4096 != 0;
}

/// to[c] = factor * from[c] for one row of channels; with `added`, to[c] = share * to[c] + factor * from[c]. Never -0 by itself: what was
/// added to 0 and what was written first are the same.
template <bool added, Scalar T, class Arch>
void write_row(const T* from, index_t channels, T factor, T share, T* to, index_t channel_stride) {
    using lanes = simd::lanes<T, Arch>;
    const auto positive_zero = [](lanes x) { return select(x == lanes(T{0}), lanes(T{0}), x); }; // x + 0 may become part of a multiply-add
    index_t c = 0;
    if (channel_stride == 1) {
        for (; c + lanes::size <= channels; c += lanes::size) {
            auto x = lanes::load(from + c) * lanes(factor);
            if constexpr (added) x = fma(lanes(share), lanes::load(to + c), x);
            positive_zero(x).store(to + c);
        }
    }
    for (; c < channels; ++c) { // by lanes too: what is fused there must be fused here, or the layout would show in the last bit
        auto x = lanes(from[c]) * lanes(factor);
        if constexpr (added) x = fma(lanes(share), lanes(to[c * channel_stride]), x);
        T one[lanes::size];
        positive_zero(x).store(one);
        to[c * channel_stride] = one[0];
    }
}

/// Calls put(c, first, register of factor * from(first, c), factor * from(first + 1, c), ...) for each channel c and each register of rows, which
/// are transposed a square of registers at a time; rows from `rows` up to a whole register are zero.
template <Scalar T, class Arch, Scalar U, class F>
void for_each_transposed(const row_block<const U>& from, index_t rows, index_t channels, T factor, const F& put) {
    using lanes = simd::lanes<T, Arch>;
    constexpr index_t size = lanes::size;
    for (index_t first = 0; first < rows; first += size) {
        const auto present = std::min(size, rows - first);
        const U* const corner = from.data + first * from.row_stride;
        index_t c = 0;
        if constexpr (std::same_as<T, U>) {
            for (; from.channel_stride == 1 && c + size <= channels; c += size) {
                lanes square[static_cast<std::size_t>(size)];
                const auto row = [&](index_t r) { return lanes::load(corner + r * from.row_stride + c) * lanes(factor); };
                if (present == size)
#pragma GCC unroll 16
                    for (index_t r = 0; r < size; ++r) square[r] = row(r);
                else
#pragma GCC unroll 16
                    for (index_t r = 0; r < size; ++r) square[r] = r < present ? row(r) : lanes(T{0});
                simd::transpose<T, Arch>(square);
#pragma GCC unroll 16
                for (index_t r = 0; r < size; ++r) put(c + r, first, square[r]);
            }
        }
        for (; c < channels; ++c) {
            T column[static_cast<std::size_t>(size)] = {};
            for (index_t r = 0; r < present; ++r) column[r] = factor * static_cast<T>(corner[r * from.row_stride + c * from.channel_stride]);
            put(c, first, lanes::load(column));
        }
    }
}

/// Writes to[c * to_stride + r] = factor * from(r, c); rows from `rows` up to a whole register become zero.
template <Scalar T, class Arch, Scalar U>
void transpose_rows(const row_block<const U>& from, index_t rows, index_t channels, T factor, T* to, index_t to_stride) {
    for_each_transposed<T, Arch>(from, rows, channels, factor,
                                 [&](index_t c, index_t first, simd::lanes<T, Arch> column) { column.store(to + c * to_stride + first); });
}

/// Copies rows of `channels` numbers to rows of `padded` numbers, the rest zero. Column-major rows, what
/// Eigen has by default, go through registers.
template <Scalar T, class Arch>
void copy_rows(const row_block<const T>& from, index_t rows, index_t channels, T* to, index_t padded) {
    if (from.row_stride == 1 && from.channel_stride != 1 && padded == whole_registers<T, Arch>(channels)) {
        transpose_rows<T, Arch>(row_block<const T>{from.data, from.channel_stride, 1}, channels, rows, T{1}, to, padded);
        return;
    }
    for (index_t r = 0; r < rows; ++r, to += padded) {
        const T* const row = from.data + r * from.row_stride;
        if (from.channel_stride == 1)
            std::copy_n(row, channels, to);
        else
            for (index_t c = 0; c < channels; ++c) to[c] = row[c * from.channel_stride];
        std::fill(to + channels, to + padded, T{0});
    }
}

} // namespace attn::kernel
