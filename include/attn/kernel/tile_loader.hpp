// Brings tiles of strided memory into the layouts that the micro-kernel reads.
#pragma once

#include "../core/stored_view.hpp"
#include "../simd/narrow.hpp"
#include "../simd/transpose.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The count rounded up to numbers that fill whole registers.
template <Scalar T>
constexpr index_t whole_registers(index_t count) {
    return (count + simd::lanes<T>::size - 1) / simd::lanes<T>::size * simd::lanes<T>::size;
}

/// f(std::type_identity of what numbers that are computed with in T are stored as, in a format).
template <Scalar T>
void with_format(narrow_format format, const auto& f) {
    if constexpr (std::same_as<T, float>) {
        if (format == narrow_format::bfloat16) return f(std::type_identity<detail::narrow_number<narrow_format::bfloat16>>{});
        if (format == narrow_format::half) return f(std::type_identity<detail::narrow_number<narrow_format::half>>{});
    }
    f(std::type_identity<T>{});
}
/// f(row_block of the rows as they lie): of T, or of the 16-bit numbers that they are stored as. To be taken by value where something is
/// stored: what is behind a reference is read again after every store.
template <class T>
void as_they_lie(const stored_rows<T>& rows, const auto& f) {
    with_format<std::remove_const_t<T>>(
        rows.format, [&]<class E>(std::type_identity<E>) { f(rows.template as<std::conditional_t<std::is_const_v<T>, const E, E>>()); });
}
/// f(the rows), which are of T.
template <class T>
void as_they_lie(const row_block<T>& rows, const auto& f) {
    f(rows);
}
/// A register of a row's numbers from a channel on, of rows whose channels stand next to each other.
template <class V>
auto load_lanes(const row_block<V>& rows, index_t row, index_t channel) {
    return simd::operand_lanes<std::remove_const_t<V>>::load(rows.data + row * rows.row_stride + channel);
}

/// One register of a row's channels from channel c on, `present` of them: the same numbers whatever the layout.
template <Scalar T>
[[gnu::always_inline]] inline simd::lanes<T> load_channels(const T* row, index_t channel_stride, index_t c, index_t present) {
    using lanes = simd::lanes<T>;
    if (channel_stride == 1) return present >= lanes::size ? lanes::load(row + c) : lanes::load_first(row + c, present);
    T numbers[lanes::size] = {};
    for (index_t l = 0; l < std::min<index_t>(present, lanes::size); ++l) numbers[l] = row[(c + l) * channel_stride];
    return lanes::load(numbers);
}

/// Stores a register of numbers, rounded to what is stored. streaming: past the caches, to whole cache lines; then finish_streaming.
template <bool streaming, Scalar T>
void store_stored(simd::lanes<T> x, T* to) {
    if constexpr (streaming) x.store_streaming(to);
    else x.store(to);
}
template <bool streaming, narrow_format format>
void store_stored(simd::lanes<float> x, detail::narrow_number<format>* to) {
    simd::narrow_lanes<format>::template narrow<streaming>(x.value, reinterpret_cast<std::uint16_t*>(to));
}
/// Stores the first `count` numbers of a register, rounded to what is stored; writes no further.
template <Scalar T>
void store_first_stored(simd::lanes<T> x, T* to, index_t count) {
    x.store_first(to, count);
}
template <narrow_format format>
void store_first_stored(simd::lanes<float> x, detail::narrow_number<format>* to, index_t count) {
    std::array<std::uint16_t, simd::lanes<float>::batch::size> rounded;
    simd::narrow_lanes<format>::narrow(x.value, rounded.data());
    std::memcpy(to, rounded.data(), static_cast<std::size_t>(count) * 2);
}

/// True if the micro-kernel should read the rows where they lie. Rows a multiple of 4 KiB apart share the sets of the first-level cache and
/// evict each other.
template <class T>
bool readable_in_place(const row_block<T>& rows) {
    return rows.channel_stride == 1 && rows.row_stride * static_cast<index_t>(sizeof(T)) % 4096 != 0;
}
/// True if the micro-kernel should read stored rows where they lie; those of 16-bit numbers it cannot read.
template <class T>
bool readable_in_place(const stored_rows<T>& rows) {
    return !rows.is_narrow() && readable_in_place(rows.numbers());
}

/// to[c] = factor * from[c] for one row of channels; with `added`, to[c] = share * to[c] + factor * from[c]. Never -0 by itself: what was
/// added to 0 and what was written first are the same.
template <bool added, Scalar T>
void write_row(const T* from, index_t channels, T factor, T share, T* to, index_t channel_stride) {
    using lanes = simd::lanes<T>;
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

/// Whether no number of some rows is NaN or infinity. channels: whole registers.
template <Scalar T>
bool are_finite(const row_block<const T>& rows, index_t count, index_t channels) {
    using lanes = simd::lanes<T>;
    lanes zero[4] = {T{0}, T{0}, T{0}, T{0}}; // four chains: one would wait for its own last step
    for (index_t r = 0; r < count; ++r) {
        const T* at = rows.address(r);
        auto left = channels / lanes::size;
        for (; left >= 4; left -= 4)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, at += lanes::size) zero[i] = fma(lanes::load(at), lanes(T{0}), zero[i]);
        for (; left > 0; --left, at += lanes::size) zero[0] = fma(lanes::load(at), lanes(T{0}), zero[0]);
    }
    return (zero[0] + zero[1] + (zero[2] + zero[3]) == lanes(T{0})).bits() == simd::lane_bits::first(lanes::size);
}

/// Calls put(c, first, register of factor * from(first, c), factor * from(first + 1, c), ...) for each channel c and each register of rows,
/// which are transposed a square of registers at a time; rows from `rows` up to a whole register are zero.
template <class V, Scalar T, class F>
void for_each_transposed(row_block<V> from, index_t rows, index_t channels, T factor, const F& put) {
    using lanes = simd::lanes<T>;
    constexpr index_t size = lanes::size;
    for (index_t first = 0; first < rows; first += size) {
        const auto present = std::min(size, rows - first);
        index_t c = 0;
        for (; from.channel_stride == 1 && c + size <= channels; c += size) {
            lanes square[static_cast<std::size_t>(size)];
            const auto row = [&](index_t r) { return load_lanes(from, first + r, c) * lanes(factor); };
            if (present == size)
#pragma GCC unroll 16
                for (index_t r = 0; r < size; ++r) square[r] = row(r);
            else
#pragma GCC unroll 16
                for (index_t r = 0; r < size; ++r) square[r] = r < present ? row(r) : lanes(T{0});
            simd::transpose<T>(square);
#pragma GCC unroll 16
            for (index_t r = 0; r < size; ++r) put(c + r, first, square[r]);
        }
        for (; c < channels; ++c) {
            T column[static_cast<std::size_t>(size)] = {};
            for (index_t r = 0; r < present; ++r) column[r] = factor * from(first + r, c);
            put(c, first, lanes::load(column));
        }
    }
}
/// Writes to[c * to_stride + r] = factor * from(r, c); rows from `rows` up to a whole register become zero. asks_ahead: rows may lie pages
/// apart, so the next are asked for beside each.
template <class V, Scalar T>
void transpose_as_they_lie(row_block<V> from, index_t rows, index_t channels, T factor, T* to, index_t to_stride, bool asks_ahead) {
    using lanes = simd::lanes<T>;
    for_each_transposed(from, rows, channels, factor, [from, to, to_stride, asks_ahead](index_t c, index_t first, lanes column) {
        if (asks_ahead) simd::prefetch(from.address(first + lanes::size + c % lanes::size, c - c % lanes::size));
        column.store(to + c * to_stride + first);
    });
}
/// The same of rows as they are stored, which lie near each other.
template <Scalar T>
void transpose_rows(const auto& from, index_t rows, index_t channels, T factor, T* to, index_t to_stride) {
    as_they_lie(from, [&](const auto& own) { transpose_as_they_lie(own, rows, channels, factor, to, to_stride, false); });
}

template <class V, Scalar T>
void copy_as_they_lie(row_block<V> from, index_t rows, index_t channels, T* to, index_t padded) {
    using lanes = simd::lanes<T>;
    if (from.channel_stride == 1 && padded == channels && from.row_stride == channels)
        channels = padded = channels * std::exchange(rows, 1);
    const auto whole = from.channel_stride == 1 ? channels / lanes::size * lanes::size : 0;
    for (index_t r = 0; r < rows; ++r, to += padded) {
        for (index_t c = 0; c < whole; c += lanes::size) load_lanes(from, r, c).store(to + c);
        for (auto c = whole; c < channels; ++c) to[c] = from(r, c);
        std::fill(to + channels, to + padded, T{0});
    }
}
/// Copies rows of `channels` numbers to rows of `padded` numbers, the rest zero. Column-major rows, what Eigen has by default and a
/// linear's weight is, go through registers.
template <Scalar T>
void copy_rows(const auto& from, index_t rows, index_t channels, T* to, index_t padded) {
    if (from.row_stride == 1 && from.channel_stride != 1 && padded == whole_registers<T>(channels))
        return as_they_lie(from.transposed(),
                           [&](const auto& columns) { transpose_as_they_lie(columns, channels, rows, T{1}, to, padded, true); });
    as_they_lie(from, [&](const auto& own) { copy_as_they_lie(own, rows, channels, to, padded); });
}

/// How the operands of a multiply-add are made of rows of numbers: for the products of T they are the numbers.
template <Scalar T>
struct number_rows {
    using operand = T;
    static constexpr bool are_copies = false; ///< rows may be read as they lie
    /// How many rows of operands so many rows make.
    static index_t rows(index_t count) { return count; }
    /// How many operands a row has, in whole registers.
    static index_t width(index_t channels) { return whole_registers<T>(channels); }
    /// Copies rows to operands, with so many of zeros before and perhaps one after.
    static void copy(const auto& from, index_t rows, index_t, index_t channels, T* to, index_t width) {
        copy_rows<T>(from, rows, channels, to, width);
    }
};

/// How the operands of products lie: those of neighbouring channels in one row, or of neighbouring rows.
template <Scalar T, class E>
struct operand_rows {
    using of_channels = number_rows<T>;
    using of_rows = number_rows<T>;
};

/// Writes rows of numbers, `from_stride` apart, as they are stored. streaming: past the caches, to aligned rows; then finish_streaming.
template <Scalar T, bool streaming = false>
void store_rows(const T* from, index_t from_stride, index_t rows, index_t channels, const auto& to) {
    using lanes = simd::lanes<T>;
    as_they_lie(to, [&](auto own) {
        const auto whole = own.channel_stride == 1 ? channels / lanes::size * lanes::size : 0;
        const T* row = from;
        for (index_t r = 0; r < rows; ++r, row += from_stride) {
            for (index_t c = 0; c < whole; c += lanes::size) store_stored<streaming>(lanes::load(row + c), own.address(r) + c);
            for (auto c = whole; c < channels; ++c) own(r, c) = row[c];
        }
    });
}
/// Writes a row of numbers as it is stored.
template <Scalar T>
void store_row(const T* from, index_t channels, const auto& to) {
    store_rows<T>(from, channels, 1, channels, to);
}

} // namespace attn::kernel
