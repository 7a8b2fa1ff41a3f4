// The shape of a four-dimensional tensor, and the error that speaks of shapes.
#pragma once

#include "scalar.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Extents of a tensor (batch, heads, tokens, channels). A matrix of one head is {.tokens = n, .channels = d}.
struct shape {
    index batch = 1;
    index heads = 1;
    index tokens = 0;
    index channels = 0;

    constexpr index size() const { return batch * heads * tokens * channels; }
    friend constexpr bool operator==(const shape&, const shape&) = default;
};

/// "(2, 8, 197, 64)": batch, heads, tokens, channels.
inline std::string to_string(const shape& s) {
    std::string text = "("; // appended to: gcc 12 warns wrongly of a "(" + string
    for (auto extent : {s.batch, s.heads, s.tokens}) text.append(std::to_string(extent)).append(", ");
    return text.append(std::to_string(s.channels)).append(")");
}

/// Bad input, found before anything was read or written. The message names the operator, the argument and the shapes.
struct shape_error : std::invalid_argument {
    shape_error(std::string_view operation, std::string_view argument, std::string_view problem)
        : std::invalid_argument(std::string(operation) + ": " + std::string(argument) + " " + std::string(problem)) {}
};

} // namespace attn
