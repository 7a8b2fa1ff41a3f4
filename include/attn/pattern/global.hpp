// Tokens that see all and that all see.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Tokens that see all and that all see, the first `count` positions: i < count or j < count. O(n count) pairs. A negative count is
/// refused. Beltagy et al. 2020, Longformer: local{w} | global{g}.
struct global {
    index_t count;

    constexpr auto visible(const auto& i, const auto& j) const { return i < count || j < count; }

    void check(const pattern_context& context) const { context.require_at_least(0, count, detail::named("global", count), "count"); }
};

} // namespace attn::pattern
