// The causal mask.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// The past and the present: j <= i in absolute positions. With n queries and m keys, first_query = 0 aligns the first ones, and
/// first_query = m - n the last ones.
struct causal {
    constexpr auto visible(const auto& i, const auto& j) const { return j <= i; }
};

} // namespace attn::pattern

namespace attn::inline ATTN_INSTRUCTION_SET {

using pattern::causal;

} // namespace attn
