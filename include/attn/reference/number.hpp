// What the definitions ask of the numbers that they compute with, and how those come from others.
#pragma once

#include "../core/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// Definitions are templates of the type T that everything is computed in: double for a reference, float for the textbook that a kernel is
/// judged against, or a number of one's own, with arithmetic, comparisons and std::numeric_limits, made from other numbers by static_cast:
/// an interval, or one that remembers its rounding errors. Its functions are found by its namespace, those of float and double here.
using std::abs, std::erf, std::exp, std::isnan, std::log, std::log1p, std::max, std::pow, std::sqrt, std::tanh;

namespace detail {

/// The sum of term(0) ... term(count - 1), in this order.
template <class T>
T sum_over(index_t count, const auto& term) {
    T sum = 0;
    for (index_t i = 0; i < count; ++i) sum += term(i);
    return sum;
}
/// The sum of the terms of a range, in its order.
template <class T, class Range>
    requires requires(const Range& range) { range.begin(); }
T sum_over(const Range& range, const auto& term) {
    T sum = 0;
    for (const auto& each : range) sum += term(each);
    return sum;
}

} // namespace detail

/// A contiguous copy in double of a view (batch, heads, tokens, channels), exact: what the reference of a float or 16-bit input is computed
/// from.
template <class V>
    requires requires(const V& from) {
        { from(0, 0, 0, 0) } -> std::convertible_to<double>;
    }
tensor<double> widen(const V& from) {
    tensor<double> to(from.shape());
    attn::detail::for_each_number(
        from.shape(), [&](index_t b, index_t h, index_t i, index_t c) { to(b, h, i, c) = static_cast<double>(from(b, h, i, c)); });
    return to;
}

} // namespace attn::reference
