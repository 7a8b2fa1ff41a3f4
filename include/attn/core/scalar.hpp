// The numbers attn computes with.
#pragma once

#include "instruction_set.hpp"

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__clang__) && !__FINITE_MATH_ONLY__
#if __has_warning("-Wnan-infinity-disabled")
// -fno-honor-nans and -fno-honor-infinities, each by itself, leave no macro behind, but clang knows (and tells unless attn is a
// system header): the line of the error says what to do.
#pragma clang diagnostic push
#pragma clang diagnostic error "-Wnan-infinity-disabled"
namespace attn::inline ATTN_INSTRUCTION_SET::detail {
constexpr bool has_nan_and_infinity(double x) {
    return __builtin_isnan(x) || __builtin_isinf(x); // attn: compile without -fno-honor-nans and -fno-honor-infinities
}
} // namespace attn::detail
#pragma clang diagnostic pop
#endif
#endif

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Sizes, strides and positions: signed and 64 bits wide, so that differences of positions need no care. In WebAssembly addresses have 32.
using index_t = std::conditional_t<sizeof(std::ptrdiff_t) == 8, std::ptrdiff_t, std::int64_t>;

/// An element type that the kernels compute in.
template <class T>
concept Scalar = std::same_as<T, float> || std::same_as<T, double>;

} // namespace attn
