// How many registers a tile of sums may take.
#pragma once

#include "../../simd/lanes.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How the registers of an instruction set shape the micro-kernel.
template <Scalar T>
struct tile_traits {
    static constexpr int lane_count = simd::lanes<T>::size;
    /// Columns of a tile, in registers: of 32 registers 24 accumulate, as 6 x 4 or 8 x 3; of 16 registers 12, as 6 x 2.
    static constexpr int max_columns = simd::register_count >= 32 ? 4 : 2;
    /// Rows of a tile of that many columns. More than 24 accumulators spill on clang; fewer than 8 wait for each other.
    static constexpr int max_rows(int columns) {
        constexpr int of_32[] = {16, 12, 8, 6}, of_16[] = {8, 6};
        return simd::register_count >= 32 ? of_32[columns - 1] : of_16[columns - 1];
    }
};

} // namespace attn::kernel
