// Transposes a square of registers in registers.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

#include <bit>
#include <cstring>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

/// Alternates the lanes of two registers, beginning at lane Begin of each: a0 b0 a1 b1 ...
template <int Begin, class V, int... Index>
[[gnu::always_inline]] inline V zip(V a, V b, std::integer_sequence<int, Index...>) {
    return __builtin_shufflevector(a, b, (Begin + Index / 2 + Index % 2 * static_cast<int>(sizeof...(Index)))...);
}
/// Every second lane of two registers, beginning at lane Begin: what zip made one of.
template <int Begin, class V, int... Index>
[[gnu::always_inline]] inline V unzip(V a, V b, std::integer_sequence<int, Index...>) {
    return __builtin_shufflevector(a, b, (Begin + 2 * Index)...);
}

/// The lanes that are By further, those behind the last being the first.
template <int By, class V, int... Index>
[[gnu::always_inline]] inline V rotate(V a, std::integer_sequence<int, Index...>) {
    return __builtin_shufflevector(a, a, ((Index + By) % static_cast<int>(sizeof...(Index)))...);
}

} // namespace detail

/// Each lane with all that are a multiple of so many lanes from it, a power of two: joined two by two by op, whose order does not matter.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> join_every(lanes<T> a, index_t step, const auto& op) {
    constexpr int size = lanes<T>::size;
    using vector = typename detail::vector_of<T, size>::type;
    unroll<std::countr_zero(static_cast<unsigned>(size))>([&](auto round) {
        constexpr int by = size >> (round() + 1);
        if (by < step) return;
        a = op(a, std::bit_cast<lanes<T>>(detail::rotate<by>(std::bit_cast<vector>(a), std::make_integer_sequence<int, size>{})));
    });
    return a;
}

/// Puts the lanes 0 of some registers side by side, a power of two of them, then their lanes 1, and so on: as one run of memory, to[lane *
/// Rows + r] = rows[r][lane]. log2(Rows) rounds of zipping row r with row r + Rows / 2 do it; each round is `Rows` shuffles. Registers of
/// anything as wide as T.
template <int Rows, Scalar T, class Register = lanes<T>>
[[gnu::always_inline]] inline void interleave(Register* rows) {
    constexpr int size = lanes<T>::size;
    using vector = typename detail::vector_of<T, size>::type;
    constexpr auto lane = std::make_integer_sequence<int, size>{};
    vector from[static_cast<std::size_t>(Rows)], to[static_cast<std::size_t>(Rows)];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) from[r] = std::bit_cast<vector>(rows[r]);
#pragma GCC unroll 4
    for (int round = 1; round < Rows; round *= 2) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows / 2; ++r) {
            to[2 * r] = detail::zip<0>(from[r], from[r + Rows / 2], lane);
            to[2 * r + 1] = detail::zip<size / 2>(from[r], from[r + Rows / 2], lane);
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) from[r] = to[r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) rows[r] = std::bit_cast<Register>(from[r]);
}
/// The other way round: rows[r][lane] = from[lane * Rows + r], of a run of memory that a power of two of registers holds.
template <int Rows, Scalar T>
[[gnu::always_inline]] inline void deinterleave(lanes<T>* rows) {
    using vector = typename detail::vector_of<T, lanes<T>::size>::type;
    constexpr auto lane = std::make_integer_sequence<int, lanes<T>::size>{};
    for (int round = 1; round < Rows; round *= 2) {
        lanes<T> to[std::size_t{Rows}];
        unroll<Rows / 2>([&](auto r) {
            const auto a = std::bit_cast<vector>(rows[2 * r]), b = std::bit_cast<vector>(rows[2 * r + 1]);
            to[r] = std::bit_cast<lanes<T>>(detail::unzip<0>(a, b, lane));
            to[r + Rows / 2] = std::bit_cast<lanes<T>>(detail::unzip<1>(a, b, lane));
        });
        unroll<Rows>([&](auto r) { rows[r] = to[r]; });
    }
}
/// Swaps rows and columns of a square, rows[0 .. size): lane c of rows[r] becomes lane r of rows[c].
template <Scalar T, class Register = lanes<T>>
[[gnu::always_inline]] inline void transpose(Register* rows) {
    interleave<lanes<T>::size, T>(rows);
}

/// Stores the columns first .. end - 1 of some rows, a power of two of them that a register holds: to[c * stride] = lane c of each row,
/// then zeros up to a register; or, with a stride of Rows, nothing between them, and what is beyond the last, up to a register for each
/// row, is written too. The rows are overwritten.
template <int Rows, Scalar T>
[[gnu::always_inline]] inline void store_columns(lanes<T>* rows, index_t first, index_t end, T* to, index_t stride) {
    constexpr int size = lanes<T>::size;
    interleave<Rows, T>(rows);
    if (stride == Rows && first == 0) {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) rows[r].store(to + r * size);
        return;
    }
    T columns[std::size_t{size * Rows}];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) rows[r].store(columns + r * size);
    if (stride == Rows) {
        std::memcpy(to + first * Rows, columns + first * Rows, static_cast<std::size_t>((end - first) * Rows) * sizeof(T));
        return;
    }
    for (auto c = first; c < end; ++c) {
#if defined(__AVX512F__) // loads what is less than a register as fast as one
        lanes<T>::load_first(columns + c * Rows, Rows).store(to + c * stride);
#else
        lanes<T>(T{0}).store(to + c * stride);
        std::memcpy(to + c * stride, columns + c * Rows, Rows * sizeof(T));
#endif
    }
}

/// The sum over the lanes of each row of a square, rows[0 .. size), which are overwritten: lane r is that of rows[r]. Half the shuffles of
/// a transpose, for each round adds what it has zipped.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> sum_each(lanes<T>* rows) {
    constexpr int size = lanes<T>::size;
    using vector = typename detail::vector_of<T, size>::type;
    constexpr auto lane = std::make_integer_sequence<int, size>{};
    unroll<std::countr_zero(static_cast<unsigned>(size))>([&](auto round) {
        constexpr int half = size >> (round() + 1);
        unroll<half>([&](auto r) {
            const auto a = std::bit_cast<vector>(rows[r]), b = std::bit_cast<vector>(rows[r + half]);
            rows[r] = std::bit_cast<lanes<T>>(detail::zip<0>(a, b, lane)) + std::bit_cast<lanes<T>>(detail::zip<size / 2>(a, b, lane));
        });
    });
    return rows[0];
}

} // namespace attn::simd
