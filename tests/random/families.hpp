// The families of problems.
#pragma once

#include "checks.hpp"
#include "draw.hpp"

#include <vector>

namespace attn::fuzz {

/// What was drawn, and the promise that was broken, if one was.
struct outcome {
    std::string name, problem;
};

struct family {
    const char* name;
    outcome (*check)(draw&);
};

std::vector<family> all_families();

} // namespace attn::fuzz
