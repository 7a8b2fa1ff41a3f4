// The types of numbers that tests and cases are compiled for: both, unless a build that has less time says `float` alone.
#pragma once

#ifndef ATTN_TEST_NUMBERS
#define ATTN_TEST_NUMBERS float, double
#endif

#include <concepts>

namespace attn::testing {

template <class T, class... Numbers>
inline constexpr bool one_of = (std::same_as<T, Numbers> || ...);

template <class T>
inline constexpr bool is_tested = one_of<T, ATTN_TEST_NUMBERS>;

} // namespace attn::testing
