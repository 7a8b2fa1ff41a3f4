// What the definitions ask of the numbers that they compute with.
#pragma once

#include "../core/scalar.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// Definitions are templates of the type T that everything is computed in: double for a reference, float for the textbook that a kernel is
/// judged against, or a number of one's own, with arithmetic, comparisons and std::numeric_limits, made from other numbers by static_cast:
/// an interval, or one that remembers its rounding errors. Its functions are found by its namespace, those of float and double here.
using std::abs, std::exp, std::isnan, std::log, std::log1p, std::max, std::pow, std::sqrt, std::tanh;

} // namespace attn::reference
