// Where the numbers of a tensor lie in memory.
#pragma once

#include "draw.hpp"
#include "layouts.hpp"

namespace attn::fuzz {

/// Any of all layouts.
inline testing::layout draw_layout(draw& random) {
    return testing::all_layouts[static_cast<std::size_t>(random.number(0, std::ssize(testing::all_layouts) - 1))].value;
}

/// One whose channels lie side by side.
inline testing::layout draw_row_layout(draw& random) {
    using enum testing::layout;
    static constexpr testing::layout rows[] = {head_major, token_major, padded_rows, misaligned, pages_apart};
    return random.one_of(rows);
}

} // namespace attn::fuzz
