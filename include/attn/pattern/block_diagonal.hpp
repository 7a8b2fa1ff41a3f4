// Blocks that see only themselves.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Blocks of `block` positions that see only themselves: floor(i / block) == floor(j / block). O(n block) pairs. A block below one is
/// refused.
/// Qiu et al. 2019, Blockwise Self-Attention for Long Document Understanding.
struct block_diagonal {
    index_t block;

    constexpr auto visible(const auto& i, const auto& j) const { return floor_div(i, block) == floor_div(j, block); }

    void check(const pattern_context& context) const {
        context.require_at_least(1, block, detail::named("block_diagonal", block), "block");
    }
};

} // namespace attn::pattern
