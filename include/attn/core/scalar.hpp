// The numbers attn computes with.
#pragma once

#include "instruction_set.hpp"

#include <concepts>
#include <cstddef>

#ifdef __FAST_MATH__
#error "attn: -ffast-math removes the rounding and the NaN rules that attention kernels rely on; compile without it (-O3 is enough)"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Sizes, strides and positions: signed and 64 bits wide, so that differences of positions need no care.
using index = std::ptrdiff_t;

/// An element type that the kernels compute in.
template <class T>
concept Scalar = std::same_as<T, float> || std::same_as<T, double>;

} // namespace attn
