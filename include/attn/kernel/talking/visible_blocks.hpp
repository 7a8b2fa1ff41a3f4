// Which key blocks any of the heads of a query block sees.
#pragma once

#include "../softmax/visible_keys.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Calls f(number, whether all rows of all heads see all of it) for those of the key blocks from .. end - 1 that a row of a head sees
/// something of, in order, found by bisection.
template <class F>
void for_each_visible_block(const visible_keys& pattern, const query_block& queries, const key_blocks& blocks, index from, index end,
                            const F& f) {
    const auto keys = blocks.run(from, end);
    if (keys.count == 0) return;
    const auto seen = pattern.of_box(queries, visible_keys::whole, keys.positions());
    if (seen.is_none()) return;
    if (seen.is_all()) {
        for (auto block = from; block < end; ++block) f(block, true);
    } else if (end - from == 1) {
        f(from, false);
    } else {
        const auto middle = from + (end - from) / 2;
        for_each_visible_block(pattern, queries, blocks, from, middle, f);
        for_each_visible_block(pattern, queries, blocks, middle, end, f);
    }
}

} // namespace attn::kernel
