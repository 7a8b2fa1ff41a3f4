// The causal mask behind a prefix that all see.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Causal, but for the first `length` keys, which every query sees: j < length or j <= i. A negative length is refused.
/// Raffel et al. 2020, T5: the prefix language model.
struct prefix {
    index_t length;

    constexpr auto visible(const auto& i, const auto& j) const { return j < length || j <= i; }

    void check(const pattern_context& context) const { context.require_at_least(0, length, detail::named("prefix", length), "length"); }
};

} // namespace attn::pattern
