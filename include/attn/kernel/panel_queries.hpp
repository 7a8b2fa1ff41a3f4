// The queries of a panel, as lanes for patterns and score functions, and as the bits that say who sees a key.
#pragma once

#include "../pattern/schedule.hpp"
#include "../simd/positions.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Bits first .. first + count - 1.
inline std::uint64_t query_bits(index first, index count) { return simd::lane_bits::first(count).value << first; }

/// The positions of `Size` queries from the lane-th on; those beyond the last are padding.
template <Scalar T, class Arch, int Size>
simd::query_lanes<T, Arch, Size> queries_from(const query_tile& tile, index lane) {
    simd::query_lanes<T, Arch, Size> result;
    result.first = tile.first + lane * tile.step;
    result.step = tile.step;
    result.count = static_cast<int>(std::min<index>(Size, tile.count - lane));
    return result;
}

/// Takes registers of queries without any of the bits `seen` off both ends of left .. right - 1.
template <index lane_count>
void leave_out_unseen(std::uint64_t seen, index& left, index& right) {
    while (left < right && !(seen & query_bits(left * lane_count, lane_count))) ++left;
    while (left < right && !(seen & query_bits((right - 1) * lane_count, lane_count))) --right;
}

} // namespace attn::kernel
