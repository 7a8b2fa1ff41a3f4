// The rotation that spreads outlying channels over their neighbours.
#pragma once

#include "../../core/scalar.hpp"

#include <bit>
#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// row = H row, for the Hadamard matrix H of b rows, its elements divided by sqrt(b), on blocks of b channels: b is the largest power of
/// two that divides their number. H is symmetric and orthogonal, so it is its own inverse, and products of rotated rows are those of the
/// rows, to rounding. Sums and differences in one order: the same bits everywhere.
template <Scalar T>
void rotate_hadamard(T* row, index_t channels) {
    const auto block = channels & -channels;
    const auto factor = static_cast<T>(1 / std::sqrt(static_cast<double>(block)));
    for (auto* const end = row + channels; row != end; row += block) {
        for (index_t half = 1; half < block; half *= 2)
            for (index_t first = 0; first < block; first += 2 * half)
                for (auto c = first; c < first + half; ++c) {
                    const T a = row[c], b = row[c + half];
                    row[c] = a + b;
                    row[c + half] = a - b;
                }
        for (index_t c = 0; c < block; ++c) row[c] *= factor;
    }
}

} // namespace attn::kernel
