// Values as a cache keeps them, row by row, for the micro-kernel.
#pragma once

#include "key_columns.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Rows of values as they are stored in V, for the micro-kernel: each load asks for what lies so many bytes after, the same place of what
/// is read next, so that memory is asked evenly. Whole: channels are whole registers.
template <class V, Scalar T, bool Whole = true>
struct streamed_rows {
    struct place {
        const std::byte* row;
        index_t channels, channel, next;

        place& operator+=(index_t bytes) {
            row += bytes;
            return *this;
        }
        [[gnu::always_inline]] friend simd::lanes<T> load_operands(const place& at, index_t after) {
            const auto* const from = reinterpret_cast<const V*>(at.row) + at.channel + after;
            if (after * static_cast<index_t>(sizeof(V)) % 64 == 0) simd::prefetch_far(reinterpret_cast<const std::byte*>(from) + at.next);
            if constexpr (!Whole)
                if (const auto left = at.channels - at.channel - after; left < simd::lanes<T>::size)
                    return simd::operand_lanes<V>::load_first(from, left);
            return simd::operand_lanes<V>::load(from);
        }
    } data;
    index_t row_stride; ///< in bytes

    streamed_rows(const std::byte* rows, const row_format& format, index_t stride, index_t next)
        : data{rows, format.channels, 0, next}, row_stride(stride) {}
    streamed_rows from(index_t row, index_t channel) const {
        auto rows = *this;
        rows.data.row += row * row_stride;
        rows.data.channel += channel;
        return rows;
    }
};
/// The same of what is quantised, in groups that are whole.
template <int Bits, Scalar T>
struct streamed_rows<quantised_number<Bits>, T> {
    struct place {
        const std::byte* row;
        std::size_t multiples, channel; ///< bytes before the multiples
        index_t next, row_bytes;

        place& operator+=(index_t bytes) {
            row += bytes;
            return *this;
        }
        [[gnu::always_inline]] friend simd::lanes<T> load_operands(const place& at, index_t after) {
            constexpr std::size_t size = quantised_rows::group, half = size / 2;
            const auto c = at.channel + static_cast<std::size_t>(after), group = c / size;
            if (after % 64 == 0) {
                simd::prefetch_far(at.row + at.channel * Bits / 8 + at.next);
                simd::prefetch_far(at.row + at.row_bytes - 1 + at.next);
            }
            const auto* const scale = reinterpret_cast<const float*>(at.row);
            const auto* const from = at.row + at.multiples;
            if constexpr (Bits == 8) return dequantised_lanes<8, T>{static_cast<T>(scale[group]), T{0}}(from + c, 0);
            else
                return dequantised_lanes<4, T>{static_cast<T>(scale[2 * group]), static_cast<T>(scale[2 * group + 1])}(
                    from + group * half + c % half, static_cast<int>(c / half % 2 * 4));
        }
    } data;
    index_t row_stride;

    streamed_rows(const std::byte* rows, const row_format& format, index_t stride, index_t next)
        : data{rows, static_cast<std::size_t>(format.quantised().scales() * 4), 0, next, format.quantised().row_bytes()},
          row_stride(stride) {}
    streamed_rows from(index_t row, index_t channel) const {
        auto rows = *this;
        rows.data.row += row * row_stride;
        rows.data.channel += static_cast<std::size_t>(channel);
        return rows;
    }
};
} // namespace attn::kernel
