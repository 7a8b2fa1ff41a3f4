// What only some heads see.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Everything on the heads first <= head < end, nothing on others, so that heads differ in one call:
///     (on_heads{0, 2} & local{5}) | (on_heads{2, 4} & strided{6})
/// Refused: first < 0, end < first.
struct on_heads {
    static constexpr bool compares_positions = false;
    index_t first;
    index_t end;

    constexpr auto at(index_t, index_t head) const { return of_head{first <= head && head < end}; }

    void check(const pattern_context& context) const {
        if (first < 0 || end < first) context.refuse(detail::named("on_heads", first, end)(), "is no range of heads");
    }

private:
    struct of_head {
        bool everything;

        constexpr bool visible(auto, auto) const { return everything; }
    };
};

} // namespace attn::pattern
