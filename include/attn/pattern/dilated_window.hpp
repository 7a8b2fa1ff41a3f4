// Sliding windows with gaps.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// A sliding window with gaps: abs(i - j) <= window dilation and (i - j) mod dilation == 0, `window` keys to both sides, `dilation`
/// apart. O(n (2 window + 1)) pairs. Refused: window < 0, dilation < 1, a reach that does not fit an index.
/// Beltagy et al. 2020, Longformer.
struct dilated_window {
    index_t window;
    index_t dilation;

    constexpr auto visible(const auto& i, const auto& j) const {
        const auto reach = window * dilation;
        return i - j <= reach && j - i <= reach && (i - j) % dilation == 0;
    }
    constexpr index_t step() const { return dilation; }

    void check(const pattern_context& context) const {
        const auto name = detail::named("dilated_window", window, dilation);
        context.require_at_least(0, window, name, "window");
        context.require_at_least(1, dilation, name, "dilation");
        if (window > std::numeric_limits<index_t>::max() / dilation) context.refuse(name(), "reaches further than positions do");
    }
};

} // namespace attn::pattern
