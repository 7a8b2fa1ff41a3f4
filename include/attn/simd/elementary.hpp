// Elementary functions of registers and of numbers: exp, log, log1p, tanh, erf, pow, sin, cos. They are additions, multiplications,
// divisions, fused multiply-adds, comparisons and steps of integers only: the same bits on every processor that fuses, with any compiler
// and library. Largest errors found, in units in the last place, of all floats (log1p, sin, cos, pow: of a million) and of 10^8 doubles:
//
//     | | exp | log | log1p | tanh | erf | sin, cos | pow |
//     |---|---|---|---|---|---|---|---|
//     | float | 0.99 | 0.84 | 1.44 | 2.42 | 1.13 | 0.78 | 2.5 |
//     | double | 0.98 | 0.84 | 1.44 | 2.60 | 1.18 | 0.79 | 1.52 |
#pragma once

#include "exponential.hpp"
#include "logarithm.hpp"
#include "sine.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

/// What a function of registers makes of numbers.
template <Scalar T>
T of_numbers(const auto& f, std::same_as<T> auto... x) {
    std::array<T, lanes<T>::size> results;
    f(lanes<T>(x)...).store(results.data());
    return results[0];
}

} // namespace detail

// Of numbers.
template <Scalar T>
T exp(T x) {
    return detail::of_numbers<T>([](auto v) { return exp(v); }, x);
}
template <Scalar T>
T log(T x) {
    return detail::of_numbers<T>([](auto v) { return log(v); }, x);
}
template <Scalar T>
T log1p(T x) {
    return detail::of_numbers<T>([](auto v) { return log1p(v); }, x);
}
template <Scalar T>
T sin(T x) {
    return detail::of_numbers<T>([](auto v) { return sin(v); }, x);
}
template <Scalar T>
T cos(T x) {
    return detail::of_numbers<T>([](auto v) { return cos(v); }, x);
}
template <Scalar T>
T pow(T x, T y) {
    return detail::of_numbers<T>([](auto v, auto w) { return pow(v, w); }, x, y);
}

} // namespace attn::simd
