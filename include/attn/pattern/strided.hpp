// Every so many keys.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Every stride-th key, counted from the query both ways ("atrous"): (i - j) mod stride == 0. O(n^2 / stride) pairs, in runs of keys
/// that queries of one residue class share. A stride below one is refused.
/// Child et al. 2019, Generating Long Sequences with Sparse Transformers; Su 2019 (https://kexue.fm/archives/6853).
struct strided {
    index_t stride;

    constexpr auto visible(const auto& i, const auto& j) const { return (i - j) % stride == 0; }
    constexpr index_t step() const { return stride; }

    void check(const pattern_context& context) const { context.require_at_least(1, stride, detail::named("strided", stride), "stride"); }
};

} // namespace attn::pattern
