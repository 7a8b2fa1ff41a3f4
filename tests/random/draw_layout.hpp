// Where the numbers of a tensor lie in memory.
#pragma once

#include "draw.hpp"
#include "layouts.hpp"

namespace attn::fuzz {

/// Any of all layouts.
inline testing::layout draw_layout(draw& random) {
    return testing::all_layouts[static_cast<std::size_t>(random.number(0, std::ssize(testing::all_layouts) - 1))].value;
}

} // namespace attn::fuzz
