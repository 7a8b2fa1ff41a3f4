// Runs of what is seen, of products that leave out the rest.
#pragma once

#include "../gemm/matrix_tile.hpp"
#include "query_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// One bit for each of at most 64 keys that one of the rows sees.
inline std::uint64_t keys_seen(const std::uint64_t* visible, index_t keys, std::uint64_t rows) {
    std::uint64_t seen = 0;
    for (index_t j = 0; j < keys; ++j) seen |= std::uint64_t{(visible[j] & rows) != 0} << j;
    return seen;
}

/// Calls f(first, end) for the runs of the numbers 0 .. count - 1 that are seen, in order: seen(first, count) has one bit for each of at
/// most 64. What is not seen between two of them is part of a run where it takes less time than to begin again: sums are loaded and stored
/// for each.
void for_each_seen_run(index_t count, const auto& seen, const auto& f) {
    constexpr index_t short_gap = 8, word = 64;
    index_t first = 0, end = -word;
    for (index_t from = 0; from < count; from += word) {
        for (std::uint64_t bits = seen(from, std::min(word, count - from)); bits != 0;) {
            const index_t at = std::countr_zero(bits), run = std::countr_one(bits >> at);
            if (from + at - end >= short_gap) {
                if (end > 0) f(first, end);
                first = from + at;
            }
            end = from + at + run;
            bits &= ~bit_range(at, run);
        }
    }
    if (end > 0) f(first, end);
}

/// Calls f(row, count) for the rows of a product that leave out together what none of them sees: a tile's of so many registers, the tallest
/// as often as it fits. A product of no registers has none.
template <Scalar T>
void for_each_row_tile(index_t rows, index_t registers, const auto& f) {
    using traits = tile_traits<T>;
    if (registers == 0) return;
    const index_t tallest = traits::max_rows(static_cast<int>(std::min<index_t>(registers, traits::max_columns)));
    for (index_t row = 0; row < rows; row += tallest) f(row, std::min(tallest, rows - row));
}

} // namespace attn::kernel
