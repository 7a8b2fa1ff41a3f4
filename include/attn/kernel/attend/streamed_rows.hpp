// Values as a cache keeps them, row by row, for the micro-kernel.
#pragma once

#include "key_columns.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A channel of a row, in bytes as they are stored, and what is asked for beside it.
struct streamed_place {
    const std::byte* row;
    index_t channel = 0;
    const std::byte* asked = nullptr;
    index_t asked_bytes = 0; ///< for each row

    /// Goes on by so many bytes, to another row.
    streamed_place& operator+=(index_t bytes) {
        row += bytes;
        asked += asked_bytes;
        return *this;
    }
    /// Asks for the end of what a register has of these bytes, if that is not in the cache line that the register before it asked for.
    [[gnu::always_inline]] void ask(index_t begin, index_t end) const {
        if (begin == 0 || (begin - 1) / 64 != (end - 1) / 64) simd::prefetch_far(asked + end - 1);
    }
};
/// A place among numbers that are stored in V. Whole: channels are whole registers.
template <class V, Scalar T, bool Whole>
struct value_place : streamed_place {
    index_t channels;

    value_place(const std::byte* rows, const row_format& format) : streamed_place{rows}, channels(format.channels) {}
    [[gnu::always_inline]] friend simd::lanes<T> load_operands(const value_place& at, index_t after) {
        constexpr index_t size = simd::lanes<T>::size, bytes = sizeof(V);
        at.ask(after * bytes, (after + size) * bytes);
        const auto* const from = reinterpret_cast<const V*>(at.row) + at.channel + after;
        if constexpr (!Whole)
            if (const auto left = at.channels - at.channel - after; left < size) return simd::operand_lanes<V>::load_first(from, left);
        return simd::operand_lanes<V>::load(from);
    }
};
/// A place among those that are quantised, in groups that are whole.
template <int Bits, Scalar T>
struct value_place<quantised_number<Bits>, T, true> : streamed_place {
    std::size_t multiples; ///< bytes before the multiples

    value_place(const std::byte* rows, const row_format& format)
        : streamed_place{rows}, multiples(static_cast<std::size_t>(format.quantised().scales() * 4)) {}
    [[gnu::always_inline]] friend simd::lanes<T> load_operands(const value_place& at, index_t after) {
        constexpr std::size_t size = quantised_rows::group, half = size / 2;
        constexpr index_t bytes = quantised_rows::group_bytes(Bits), channels = quantised_rows::group;
        at.ask(after * bytes / channels, (after + simd::lanes<T>::size) * bytes / channels);
        const auto c = static_cast<std::size_t>(at.channel + after), group = c / size;
        const auto* const scale = reinterpret_cast<const float*>(at.row);
        const auto* const from = at.row + at.multiples;
        if constexpr (Bits == 8) return dequantised_lanes<8, T>{static_cast<T>(scale[group]), T{0}}(from + c, 0);
        else
            return dequantised_lanes<4, T>{static_cast<T>(scale[2 * group]), static_cast<T>(scale[2 * group + 1])}(
                from + group * half + c % half, static_cast<int>(c / half % 2 * 4));
    }
};

/// Rows of values for the micro-kernel. Beside its loads it asks for what is read next, rows of the same kind: in the order of addresses,
/// and as much beside each row of each tile, so that memory is asked evenly and its prefetchers see one stream.
template <class V, Scalar T, bool Whole = true>
struct streamed_rows {
    value_place<V, T, Whole> data;
    index_t row_stride;     ///< in bytes
    index_t rows, channels; ///< channels: in whole registers
    const std::byte* next;  ///< where what is read next lies

    /// The rows from one on, and of them so many channels: those of a tile.
    friend streamed_rows rows_of_tile(streamed_rows all, index_t row, index_t channel, index_t count) {
        auto& at = all.data;
        at.row += row * all.row_stride;
        at.channel = channel;
        at.asked_bytes = all.row_stride * count / all.channels;
        at.asked = all.next + all.rows * all.row_stride * channel / all.channels + row * at.asked_bytes;
        return all;
    }
};

} // namespace attn::kernel
