// Sliding windows.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// A sliding window: i - before <= j <= i + after. `local{w}` reaches w keys to both sides, 2 w + 1 in all.
/// O(n (before + after + 1)) pairs. A side below zero is refused.
/// Beltagy et al. 2020, Longformer; Su 2019 (https://kexue.fm/archives/6853).
struct local {
    index_t before;
    index_t after = before;

    constexpr auto visible(const auto& i, const auto& j) const { return i - j <= before && j - i <= after; }

    void check(const pattern_context& context) const {
        const auto name = detail::named("local", before, after);
        context.require_at_least(0, before, name, "window");
        context.require_at_least(0, after, name, "window");
    }
};

} // namespace attn::pattern
