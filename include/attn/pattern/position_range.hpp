// The third arithmetic: a predicate on positions, evaluated on whole ranges of positions at once.
#pragma once

#include "visibility.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <type_traits>

namespace attn::inline ATTN_INSTRUCTION_SET {

class position_range;

namespace detail {

/// What makes two ranges, or a range and an integer, with A: for templates, so that every integral type matches exactly.
template <class B, class A>
concept RangeWith = (std::same_as<A, position_range> && (std::same_as<B, position_range> || std::integral<B>)) ||
                    (std::integral<A> && std::same_as<B, position_range>);

constexpr index_t common_step(index_t a, index_t b) {
    if (a == b || b == 0) return a;
    if (a == 0) return b;
    return a == 1 || b == 1 ? 1 : std::gcd(a, b);
}

struct quotient_and_rest {
    index_t quotient, rest;
};

/// Schedules divide much, mostly by powers of two, and processors divide 32 bits several times faster than 64.
constexpr quotient_and_rest floor_divide(index_t a, index_t c) {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(c);
    if ((y & (y - 1)) == 0) return {a >> std::countr_zero(y), a & (c - 1)};
    if ((x | y) <= UINT32_MAX) {
        const auto quotient = static_cast<std::uint32_t>(x) / static_cast<std::uint32_t>(y);
        return {quotient, a - index_t{quotient} * c};
    }
    const bool borrow = a % c < 0;
    return {a / c - borrow, a % c + (borrow ? c : 0)};
}

namespace found_by_argument {

// Hide attn's own, so that the calls below find those that lanes bring along, and nothing else.
void floor_div();
void floor_mod();
void abs();

template <class L>
concept Lanes = std::is_class_v<L> && !std::same_as<L, position_range> && requires(const L& a, index_t c) {
    floor_div(a, c);
    floor_mod(a, c);
    abs(a);
};

constexpr auto divide(const auto& a, index_t c) { return floor_div(a, c); }
constexpr auto rest(const auto& a, index_t c) { return floor_mod(a, c); }
constexpr auto magnitude(const auto& a) { return abs(a); }

} // namespace found_by_argument

} // namespace detail

/// The positions first, first + step, ..., last; a single one has step 0. Arithmetic encloses: the result holds every value that the
/// operands' elements can give, so a comparison never claims `all` or `none` wrongly. `/` and `%` truncate, as C++ does.
class position_range : public detail::no_value<position_range, index_t> {
public:
    index_t first, last, step;

    /// A single position.
    constexpr position_range(std::integral auto at) : first(static_cast<index_t>(at)), last(first), step(0) {}
    /// Positions `from` to `to`, `by` apart.
    constexpr position_range(index_t from, index_t to, index_t by) : first(from), last(to), step(from == to ? 0 : by) {}

    friend constexpr position_range operator-(position_range a) { return {-a.last, -a.first, a.step}; }
};

/// a / c rounded towards minus infinity, so that blocks of c positions continue below zero. c > 0.
constexpr index_t floor_div(std::integral auto a, std::integral auto c) {
    return detail::floor_divide(static_cast<index_t>(a), static_cast<index_t>(c)).quotient;
}

/// a - c * floor_div(a, c): 0 <= floor_mod(a, c) < c. c > 0.
constexpr index_t floor_mod(std::integral auto a, std::integral auto c) {
    return detail::floor_divide(static_cast<index_t>(a), static_cast<index_t>(c)).rest;
}

/// The distance from 0.
constexpr index_t abs(std::integral auto a) { return a < 0 ? -static_cast<index_t>(a) : static_cast<index_t>(a); }

/// floor_div of a range: a range that holds all quotients, and more where steps do not divide.
constexpr position_range floor_div(position_range a, std::integral auto c) {
    const auto y = static_cast<index_t>(c);
    const auto step = a.step == y ? 1 : a.step > y && a.step % y == 0 ? a.step / y : 1;
    return {floor_div(a.first, y), floor_div(a.last, y), step};
}

/// floor_mod of a range: a range that holds all rests, and more where it wraps around.
constexpr position_range floor_mod(position_range a, std::integral auto c) {
    const auto y = static_cast<index_t>(c);
    const auto rest = floor_mod(a.first, y);
    if (a.step == 0 || a.step == y || (a.step > y && a.step % y == 0)) return rest;
    if (a.last - a.first < y - rest) return {rest, rest + (a.last - a.first), a.step};
    const auto step = detail::common_step(a.step, y), first = rest % step;
    return {first, y - step + first, step};
}

/// A range that holds the distances from 0.
constexpr position_range abs(position_range a) {
    if (a.first >= 0) return a;
    if (a.last <= 0) return -a;
    const auto step = a.step == 1 ? 1 : std::gcd(a.step, 2 * a.first);
    return {std::min(floor_mod(a.first, a.step), floor_mod(-a.first, a.step)), std::max(-a.first, a.last), step};
}

/// floor_div on lanes, for which a qualified name does not find what they bring along.
constexpr auto floor_div(const detail::found_by_argument::Lanes auto& a, index_t c) { return detail::found_by_argument::divide(a, c); }

/// floor_mod on lanes.
constexpr auto floor_mod(const detail::found_by_argument::Lanes auto& a, index_t c) { return detail::found_by_argument::rest(a, c); }

/// abs on lanes.
constexpr auto abs(const detail::found_by_argument::Lanes auto& a) { return detail::found_by_argument::magnitude(a); }

/// All sums of a position of each.
template <class A, detail::RangeWith<A> B>
constexpr position_range operator+(A x, B y) {
    const position_range a(x), b(y);
    return {a.first + b.first, a.last + b.last, detail::common_step(a.step, b.step)};
}

/// All differences of a position of each.
template <class A, detail::RangeWith<A> B>
constexpr position_range operator-(A x, B y) {
    const position_range a(x), b(y);
    return {a.first - b.last, a.last - b.first, detail::common_step(a.step, b.step)};
}

/// All products of a position of each.
template <class A, detail::RangeWith<A> B>
constexpr position_range operator*(A x, B y) {
    const position_range a(x), b(y);
    const auto [low, high] = std::minmax({a.first * b.first, a.first * b.last, a.last * b.first, a.last * b.last});
    return {low, high, std::gcd(std::gcd(a.first * b.step, b.first * a.step), a.step * b.step)};
}

/// All quotients by c, towards zero, as of integers.
constexpr position_range operator/(position_range a, std::integral auto c) {
    const auto y = static_cast<index_t>(c);
    if (y < 0) return -(a / -y);
    const bool even = a.step % y == 0 && (a.first >= 0 || a.last <= 0 || a.first % y == 0);
    return {a.first / y, a.last / y, even ? a.step / y : 1};
}

/// All remainders of a division by c towards zero, as of integers.
constexpr position_range operator%(position_range a, std::integral auto c) {
    const auto y = abs(c);
    if (a.first >= 0) return floor_mod(a, y);
    if (a.last <= 0) return -floor_mod(-a, y);
    if (-y < a.first && a.last < y) return a;
    // The range has both signs: every remainder is congruent to a.first modulo `step`.
    const auto step = detail::common_step(a.step, y), rest = floor_mod(a.first, step);
    const auto low = std::max(a.first, rest == 0 ? step - y : rest - y), high = std::min(a.last, y - step + rest);
    return {low, high, step};
}

/// Whether for all, some or none of the pairs x < y.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator<(A x, B y) {
    const position_range a(x), b(y);
    return {a.last < b.first, a.first >= b.last};
}

/// Whether all, some or none of the pairs are equal.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator==(A x, B y) {
    const position_range a(x), b(y);
    if (a.last < b.first || b.last < a.first) return visibility::none;
    if (a.step == 0 && b.step == 0) return visibility::all;
    const auto step = detail::common_step(a.step, b.step);
    return {false, step > 1 && (a.first - b.first) % step != 0};
}

/// Whether for all, some or none of the pairs x > y.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator>(A x, B y) {
    return y < x;
}

/// Whether for all, some or none of the pairs x <= y.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator<=(A x, B y) {
    return !(y < x);
}

/// Whether for all, some or none of the pairs x >= y.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator>=(A x, B y) {
    return !(x < y);
}

/// Whether for all, some or none of the pairs x != y.
template <class A, detail::RangeWith<A> B>
constexpr visibility operator!=(A x, B y) {
    return !(x == y);
}

} // namespace attn
