// Opaque visibility as bits, laid out for lanes of queries.
#pragma once

#include "pattern.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Rows of queries, columns of keys: 64 queries of one key are one word, and neighbouring keys are neighbouring words.
struct bit_table {
    static constexpr index_t word_rows = 64;

    const std::uint64_t* words;
    index_t rows, columns;

    static constexpr index_t word_count(index_t rows, index_t columns) { return (rows + word_rows - 1) / word_rows * columns; }

    constexpr bool bit(index_t row, index_t column) const { return words[row / word_rows * columns + column] >> row % word_rows & 1; }

    /// Bit l is that of row + l step, l < count <= 64. Bits from count on mean nothing.
    constexpr std::uint64_t bits(index_t row, index_t step, index_t count, index_t column) const {
        if (step != 1) {
            std::uint64_t gathered = 0;
            for (index_t l = 0; l < count; ++l) gathered |= std::uint64_t{bit(row + l * step, column)} << l;
            return gathered;
        }
        const auto word = row / word_rows * columns + column, shift = row % word_rows;
        const auto low = words[word] >> shift;
        return shift + count <= word_rows ? low : low | words[word + columns] << (word_rows - shift);
    }
};

/// Bits as the mask of lanes.
template <QueryLanes Index>
constexpr auto mask_of(const Index&, std::uint64_t bits) {
    return Index::mask_from_bits(bits & ~std::uint64_t{0} >> (64 - Index::size));
}

/// The mask of lanes whose queries are asked one by one: sees(query).
constexpr auto mask_of_each(const QueryLanes auto& i, const auto& sees) {
    std::uint64_t bits = 0;
    for (index_t l = 0; l < i.count; ++l) bits |= std::uint64_t{sees(i.first + l * i.step)} << l;
    return mask_of(i, bits);
}

/// The mask of lanes whose queries see the same within a block of `size` positions: sees(block) is asked once for each block.
constexpr auto mask_of_blocks(const QueryLanes auto& i, index_t size, const auto& sees) {
    std::uint64_t bits = 0;
    for (index_t l = 0; l < i.count;) {
        const auto query = i.first + l * i.step, block = floor_div(query, size), left = (block + 1) * size - query;
        const auto same = std::min<index_t>(i.count - l, i.step == 1 ? left : (left + i.step - 1) / i.step);
        if (sees(block)) bits |= ~std::uint64_t{0} >> (64 - same) << l;
        l += same;
    }
    return mask_of(i, bits);
}

} // namespace attn::detail
