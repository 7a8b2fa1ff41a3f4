// Loops over registers, unrolled where they are written.
#pragma once

#include "../core/scalar.hpp"

#include <type_traits>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

template <class F, int... Index>
[[gnu::always_inline]] inline void call_each(F& f, std::integer_sequence<int, Index...>) {
    (f(std::integral_constant<int, Index>{}), ...);
}

template <int Columns, class F, int... Index>
[[gnu::always_inline]] inline void call_each_pair(F& f, std::integer_sequence<int, Index...>) {
    (f(std::integral_constant<int, Index / Columns>{}, std::integral_constant<int, Index % Columns>{}), ...);
}

} // namespace detail

/// Between two steps of a loop in registers: gcc for AArch64 would load what several later steps want, and find no register for a sum.
[[gnu::always_inline]] inline void load_in_order() {
#if defined(__aarch64__) && !defined(__clang__)
    asm volatile("" ::: "memory");
#endif
}

/// f(0) ... f(N - 1), each index a compile-time constant. Arrays of registers that are indexed so stay in registers; an unroll
/// pragma is not enough for gcc 12, which then spills the accumulators of a micro-kernel (81 against 276 GF/s).
template <int N, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
    detail::call_each(f, std::make_integer_sequence<int, N>{});
}

/// f(0, 0), f(0, 1) ... f(Rows - 1, Columns - 1). Not one loop in the other: gcc inlines what it is given without fail if that is a step or
/// two, but a row of a tile only while the program is small. Then a tile was kept in memory, at 0.4 times the speed.
template <int Rows, int Columns, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
    detail::call_each_pair<Columns>(f, std::make_integer_sequence<int, Rows * Columns>{});
}

} // namespace attn::simd
