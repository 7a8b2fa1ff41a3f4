// Values as a cache keeps them, row by row, for the micro-kernel.
#pragma once

#include "key_columns.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A channel of a row, in bytes as they are stored.
struct streamed_place {
    const std::byte* row;
    index_t channel, next; ///< next: bytes to what is read next

    /// Goes on by so many bytes, to another row.
    streamed_place& operator+=(index_t bytes) {
        row += bytes;
        return *this;
    }
};
/// A place among numbers that are stored in V. Whole: channels are whole registers.
template <class V, Scalar T, bool Whole>
struct value_place : streamed_place {
    index_t channels;

    value_place(const std::byte* rows, const row_format& format, index_t to_next)
        : streamed_place{rows, 0, to_next}, channels(format.channels) {}
    [[gnu::always_inline]] friend simd::lanes<T> load_operands(const value_place& at, index_t after) {
        const auto* const from = reinterpret_cast<const V*>(at.row) + at.channel + after;
        if (after * static_cast<index_t>(sizeof(V)) % 64 == 0) simd::prefetch_far(reinterpret_cast<const std::byte*>(from) + at.next);
        if constexpr (!Whole)
            if (const auto left = at.channels - at.channel - after; left < simd::lanes<T>::size)
                return simd::operand_lanes<V>::load_first(from, left);
        return simd::operand_lanes<V>::load(from);
    }
};
/// A place among those that are quantised, in groups that are whole.
template <int Bits, Scalar T>
struct value_place<quantised_number<Bits>, T, true> : streamed_place {
    std::size_t multiples; ///< bytes before the multiples
    index_t row_bytes;

    value_place(const std::byte* rows, const row_format& format, index_t to_next)
        : streamed_place{rows, 0, to_next}, multiples(static_cast<std::size_t>(format.quantised().scales() * 4)),
          row_bytes(format.quantised().row_bytes()) {}
    [[gnu::always_inline]] friend simd::lanes<T> load_operands(const value_place& at, index_t after) {
        constexpr std::size_t size = quantised_rows::group, half = size / 2;
        const auto c = static_cast<std::size_t>(at.channel + after), group = c / size;
        if (after % 64 == 0) {
            simd::prefetch_far(at.row + static_cast<std::size_t>(at.channel) * Bits / 8 + at.next);
            simd::prefetch_far(at.row + at.row_bytes - 1 + at.next);
        }
        const auto* const scale = reinterpret_cast<const float*>(at.row);
        const auto* const from = at.row + at.multiples;
        if constexpr (Bits == 8) return dequantised_lanes<8, T>{static_cast<T>(scale[group]), T{0}}(from + c, 0);
        else
            return dequantised_lanes<4, T>{static_cast<T>(scale[2 * group]), static_cast<T>(scale[2 * group + 1])}(
                from + group * half + c % half, static_cast<int>(c / half % 2 * 4));
    }
};

/// Rows of values for the micro-kernel: each load asks for what lies so many bytes after, the same place of what is read next, so that
/// memory is asked evenly.
template <class V, Scalar T, bool Whole = true>
struct streamed_rows {
    value_place<V, T, Whole> data;
    index_t row_stride; ///< in bytes

    streamed_rows from(index_t row, index_t channel) const {
        auto rows = *this;
        rows.data += row * row_stride;
        rows.data.channel += channel;
        return rows;
    }
};

} // namespace attn::kernel
