// Which positions there are, and sums that stay among the numbers that an index holds.
#pragma once

#include "shape.hpp"

#include <algorithm>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Positions lie between -farthest_position and farthest_position, so that differences of two, and sums of a few such differences, fit an
/// index. What lies beyond is refused.
inline constexpr index_t farthest_position = index_t{1} << 60;

namespace detail {

/// a + b, or the nearest index to it.
constexpr index_t saturating_sum(index_t a, index_t b) {
    constexpr auto min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    if (b >= 0) return a > max_index - b ? max_index : a + b;
    return a < min_index - b ? min_index : a + b;
}

/// Throws argument_error unless `count` rows from position `first` on lie at positions that there are.
inline void check_positions(std::string_view operation, std::string_view argument, index_t first, index_t count) {
    if (first >= -farthest_position && first <= farthest_position - std::max<index_t>(count - 1, 0)) return;
    detail::raise(argument_error(operation, argument,
                                 joined({"is ", std::to_string(first), " for ", std::to_string(count),
                                         " rows, but positions lie between -2^60 and 2^60 (attn::farthest_position)"})));
}

} // namespace detail

} // namespace attn
