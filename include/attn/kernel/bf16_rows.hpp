// Rows of numbers as pairs of bfloat16: what is multiplied with bf16_products.
#pragma once

#include "../simd/bf16_lanes.hpp"
#include "tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A register of numbers of a row, from a channel on; 0 for those that it has not.
template <class V>
simd::lanes<float> load_or_zero(const row_block<const V>& from, index_t row, index_t channel, index_t channels) {
    using lanes = simd::lanes<float>;
    if (channel + lanes::size <= channels) return load_lanes(from, row, channel);
    float numbers[lanes::size] = {};
    for (index_t c = channel; c < channels; ++c) numbers[c - channel] = from(row, c);
    return lanes::load(numbers);
}

/// f(rows, first row, count, first channel, count) for pieces, a row_block each, whose channels stand next to each other. What is laid out
/// otherwise goes through a copy, an even number of rows at a time, from row -before on.
inline void for_each_piece_of_rows(const stored_rows<const float>& from, index_t rows, index_t before, index_t channels, const auto& f) {
    constexpr index_t some_rows = 16, some_channels = 64;
    if (from.channel_stride == 1) return as_they_lie(from, [&](const auto& own) { f(own, index_t{0}, rows, index_t{0}, channels); });
    float piece[static_cast<std::size_t>(some_rows * some_channels)];
    const row_block<const float> copied{piece, some_channels, 1};
    for (index_t first = -before; first < rows; first += some_rows)
        for (index_t channel = 0; channel < channels; channel += some_channels) {
            const auto row = std::max<index_t>(0, first), count = std::min(rows, first + some_rows) - row,
                       width = std::min(some_channels, channels - channel);
            copy_rows<float>(from.from(row, channel), count, width, piece, some_channels);
            f(copied, row, count, channel, width);
        }
}

/// Pairs of neighbours in a row; of an odd number of channels, the last stands with 0.
struct channel_pairs {
    using operand = simd::bf16_pair;
    using lanes = simd::bf16_lanes;
    static constexpr bool are_copies = true;

    static index_t rows(index_t count) { return count; }
    static index_t width(index_t channels) { return whole_registers<float>((channels + 1) / 2); }
    static void copy(const stored_rows<const float>& from, index_t rows, index_t, index_t channels, operand* to, index_t width) {
        const auto copy_piece = [to, width](auto own, index_t first_row, index_t count, index_t first, index_t present) {
            for (index_t r = 0; r < count; ++r) {
                operand* const row = to + (first_row + r) * width + first / 2;
                index_t c = 0;
                for (; c + 2 * lanes::size <= present; c += 2 * lanes::size)
                    lanes::of_neighbours(load_lanes(own, r, c), load_lanes(own, r, c + lanes::size)).store(row + c / 2);
                for (; c < present; c += 2 * lanes::size) {
                    operand pairs[lanes::size];
                    lanes::of_neighbours(load_or_zero(own, r, c, present), load_or_zero(own, r, c + lanes::size, present)).store(pairs);
                    std::copy_n(pairs, std::min<index_t>(lanes::size, width - (first + c) / 2), row + c / 2);
                }
            }
        };
        for_each_piece_of_rows(from, rows, 0, channels, copy_piece);
    }
};

/// Pairs of rows, a channel of each in a pair; where there is no row, 0.
struct row_pairs {
    using operand = simd::bf16_pair;
    using lanes = simd::bf16_lanes;
    static constexpr bool are_copies = true;

    static index_t rows(index_t count) { return (count + 1) / 2; }
    static index_t width(index_t channels) { return whole_registers<float>(channels); }
    static void copy(const stored_rows<const float>& from, index_t rows, index_t before, index_t channels, operand* to, index_t width) {
        if (before == 0 && from.row_stride == 1 && from.channel_stride != 1)
            return copy_columns(from.transposed(), channels, rows, to, width);
        const auto copy_piece = [to, width, before](auto own, index_t first_row, index_t count, index_t first, index_t present) {
            for (index_t r = -((before + first_row) % 2); r < count; r += 2) { // the first may be the second of its pair
                operand* const row = to + (before + first_row + r) / 2 * width + first;
                index_t c = 0;
                if (0 <= r && r + 1 < count)
                    for (; c + lanes::size <= present; c += lanes::size)
                        lanes::of(load_lanes(own, r, c), load_lanes(own, r + 1, c)).store(row + c);
                const auto part = [&](index_t i) {
                    return 0 <= i && i < count ? load_or_zero(own, i, c, present) : typename lanes::floats(0.0F);
                };
                for (; c < present; c += lanes::size) lanes::of(part(r), part(r + 1)).store(row + c);
            }
        };
        for_each_piece_of_rows(from, rows, before, channels, copy_piece);
    }

private:
    /// Copies `count` columns of `rows` rows: neighbours in a column are a pair, and squares of pairs are transposed in registers.
    static void copy_columns(const stored_rows<const float>& columns, index_t count, index_t rows, operand* to, index_t width) {
        constexpr index_t size = lanes::size;
        as_they_lie(columns, [&](auto own) {
            for (index_t first = 0; first < count; first += size)
                for (index_t r = 0; r < rows; r += 2 * size) {
                    lanes square[static_cast<std::size_t>(size)];
                    for (index_t c = 0; c < size; ++c) {
                        simd::prefetch(own.address(first + size + c, r));
                        simd::prefetch(own.address(first + size + c, r + size));
                        const auto part = [&](index_t row) {
                            return first + c < count ? load_or_zero(own, first + c, row, rows) : typename lanes::floats(0.0F);
                        };
                        square[c] = lanes::of_neighbours(part(r), part(r + size));
                    }
                    simd::transpose<float>(square);
                    for (index_t p = 0; p < std::min(size, (rows - r + 1) / 2); ++p) square[p].store(to + (r / 2 + p) * width + first);
                }
        });
    }
};

template <>
struct operand_rows<float, simd::bf16_pair> {
    using of_channels = channel_pairs;
    using of_rows = row_pairs;
};

} // namespace attn::kernel
