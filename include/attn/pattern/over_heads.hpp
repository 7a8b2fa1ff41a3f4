// A pattern of heads that are computed together.
#pragma once

#include "pattern.hpp"

#include <numeric>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// One batch entry of a pattern for all its heads together: a key is seen if any head sees it, and ranges are all visible if they are to
/// all.
template <Pattern P>
struct over_heads {
    const P& pattern;
    index_t batch, heads;

    constexpr visibility visible(const position_range& i, const position_range& j) const { return of_all(i, j); }
    constexpr bool visible(index_t i, index_t j) const {
        for (index_t c = 0; c < patterns(); ++c)
            if (bool(at(pattern, batch, c).visible(i, j))) return true;
        return false;
    }
    /// The step that all heads promise.
    constexpr index_t step() const {
        index_t common = 0;
        for (index_t c = 0; c < patterns(); ++c) common = std::gcd(common, step_of(at(pattern, batch, c)));
        return std::max<index_t>(common, 1);
    }

private:
    /// How many different patterns the heads have at most.
    constexpr index_t patterns() const { return attn::heads_alike(pattern) ? std::min<index_t>(heads, 1) : heads; }
    constexpr visibility of_all(const position_range& i, const position_range& j) const {
        bool all = heads > 0, none = true;
        for (index_t c = 0; c < patterns(); ++c) {
            const visibility seen = at(pattern, batch, c).visible(i, j);
            all = all && seen.is_all();
            none = none && seen.is_none();
        }
        return {all, none};
    }
};

} // namespace attn::detail
