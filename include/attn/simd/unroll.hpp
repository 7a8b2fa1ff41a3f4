// Loops over registers, unrolled where they are written.
#pragma once

#include "../core/scalar.hpp"

#include <type_traits>
#include <utility>

namespace attn::simd {

namespace detail {

template <class F, int... I>
[[gnu::always_inline]] inline void call_each(F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

} // namespace detail

/// f(0) ... f(N - 1), each index a compile-time constant. Arrays of registers that are indexed so stay in registers; an unroll
/// pragma is not enough for gcc 12, which then spills the accumulators of a micro-kernel (81 against 276 GF/s).
template <int N, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
    detail::call_each(f, std::make_integer_sequence<int, N>{});
}

} // namespace attn::simd
