// The third arithmetic: a predicate on positions, evaluated on whole ranges of positions at once.
#pragma once

#include "../core/scalar.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

namespace attn {

namespace detail {

template <class>
inline constexpr bool never = false;

// A base, so above its users. Its conversion is no template, so that built-in operators, subscripts and standard functions all
// find it, and is a member of one, so that it fails only where it is used.
template <class Self, class Value>
struct no_value {
    operator Value() const {
        static_assert(never<Self>,
                      "attn: this predicate cannot be evaluated on ranges of positions: use + - * / % and comparisons of i and j, "
                      "joined by && || !, without table[j], if, ?: or conversions; "
                      "attn::tiles(mask, n, m) makes a pattern of an opaque mask");
        return {};
    }
};

} // namespace detail

/// What is known of a box of (query, key) pairs: none is visible, all are, or anything may be. `&&`, `||`, `!`, `==` and `!=` are
/// three-valued, also with `bool`: all means true of every pair, none false of every pair.
class visibility : public detail::no_value<visibility, bool> {
public:
    static const visibility none, some, all;

    constexpr visibility(std::same_as<bool> auto known) : visibility(known, !known) {}
    constexpr visibility(bool always, bool never) : level_(1 + int{always} - int{never}) {}

    constexpr bool is_none() const { return level_ == 0; }
    constexpr bool is_all() const { return level_ == 2; }

    friend constexpr visibility operator!(visibility a) { return visibility(2 - a.level_); }
    static constexpr visibility least(visibility a, visibility b) { return visibility(std::min(a.level_, b.level_)); }
    static constexpr visibility greatest(visibility a, visibility b) { return visibility(std::max(a.level_, b.level_)); }

private:
    constexpr explicit visibility(std::same_as<int> auto level) : level_(level) {}

    int level_; // 0 none, 1 some, 2 all
};

inline constexpr visibility visibility::none{false}, visibility::some{false, false}, visibility::all{true};

/// The positions first, first + step, ..., last; a single one has step 0. Arithmetic encloses: the result holds every value that the
/// operands' elements can give, so a comparison never claims `all` or `none` wrongly. `/` and `%` truncate, as C++ does.
class range : public detail::no_value<range, index> {
public:
    index first, last, step;

    constexpr range(std::integral auto at) : first(static_cast<index>(at)), last(first), step(0) {}
    constexpr range(index from, index to, index by) : first(from), last(to), step(from == to ? 0 : by) {}

    friend constexpr range operator-(range a) { return {-a.last, -a.first, a.step}; }
};

namespace detail {

template <class T>
concept RangeOperand = std::same_as<T, range> || std::integral<T>;

template <class T>
concept VisibilityOperand = std::same_as<T, visibility> || std::same_as<T, bool>;

constexpr index common_step(index a, index b) {
    if (a == b || b == 0) return a;
    if (a == 0) return b;
    return a == 1 || b == 1 ? 1 : std::gcd(a, b);
}

struct quotient_and_rest {
    index quotient, rest;
};

/// Schedules divide much, mostly by powers of two, and processors divide 32 bits several times faster than 64.
constexpr quotient_and_rest floor_divide(index a, index c) {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(c);
    if ((y & (y - 1)) == 0) return {a >> std::countr_zero(y), a & (c - 1)};
    if ((x | y) <= UINT32_MAX) return {static_cast<std::uint32_t>(x) / static_cast<std::uint32_t>(y), static_cast<std::uint32_t>(x) % static_cast<std::uint32_t>(y)};
    const bool borrow = a % c < 0;
    return {a / c - borrow, a % c + (borrow ? c : 0)};
}

} // namespace detail

/// a / c rounded towards minus infinity, so that blocks of c positions continue below zero. c > 0.
constexpr index floor_div(std::integral auto a, std::integral auto c) {
    return detail::floor_divide(static_cast<index>(a), static_cast<index>(c)).quotient;
}

/// a - c * floor_div(a, c): 0 <= floor_mod(a, c) < c. c > 0.
constexpr index floor_mod(std::integral auto a, std::integral auto c) {
    return detail::floor_divide(static_cast<index>(a), static_cast<index>(c)).rest;
}

constexpr index abs(std::integral auto a) { return a < 0 ? -static_cast<index>(a) : static_cast<index>(a); }

constexpr range floor_div(range a, std::integral auto c) {
    const auto y = static_cast<index>(c);
    const auto step = a.step == y ? 1 : a.step > y && a.step % y == 0 ? a.step / y : 1;
    return {floor_div(a.first, y), floor_div(a.last, y), step};
}

constexpr range floor_mod(range a, std::integral auto c) {
    const auto y = static_cast<index>(c);
    const auto rest = floor_mod(a.first, y);
    if (a.step == 0 || a.step == y || (a.step > y && a.step % y == 0)) return rest;
    if (a.last - a.first < y - rest) return {rest, rest + (a.last - a.first), a.step};
    const auto step = detail::common_step(a.step, y), first = rest % step;
    return {first, y - step + first, step};
}

constexpr range abs(range a) {
    if (a.first >= 0) return a;
    if (a.last <= 0) return -a;
    const auto step = a.step == 1 ? 1 : std::gcd(a.step, 2 * a.first);
    return {std::min(floor_mod(a.first, a.step), floor_mod(-a.first, a.step)), std::max(-a.first, a.last), step};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr range operator+(A x, B y) {
    const range a(x), b(y);
    return {a.first + b.first, a.last + b.last, detail::common_step(a.step, b.step)};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr range operator-(A x, B y) {
    const range a(x), b(y);
    return {a.first - b.last, a.last - b.first, detail::common_step(a.step, b.step)};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr range operator*(A x, B y) {
    const range a(x), b(y);
    const auto [low, high] = std::minmax({a.first * b.first, a.first * b.last, a.last * b.first, a.last * b.last});
    return {low, high, std::gcd(std::gcd(a.first * b.step, b.first * a.step), a.step * b.step)};
}

constexpr range operator/(range a, std::integral auto c) {
    const auto y = static_cast<index>(c);
    if (y < 0) return -(a / -y);
    const bool even = a.step % y == 0 && (a.first >= 0 || a.last <= 0 || a.first % y == 0);
    return {a.first / y, a.last / y, even ? a.step / y : 1};
}

constexpr range operator%(range a, std::integral auto c) {
    const auto y = abs(c);
    if (a.first >= 0) return floor_mod(a, y);
    if (a.last <= 0) return -floor_mod(-a, y);
    if (-y < a.first && a.last < y) return a;
    // Of both signs: every remainder is congruent to a.first modulo `step`.
    const auto step = detail::common_step(a.step, y), rest = floor_mod(a.first, step);
    const auto low = std::max(a.first, rest == 0 ? step - y : rest - y), high = std::min(a.last, y - step + rest);
    return {low, high, step};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator<(A x, B y) {
    const range a(x), b(y);
    return {a.last < b.first, a.first >= b.last};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator==(A x, B y) {
    const range a(x), b(y);
    if (a.last < b.first || b.last < a.first) return visibility::none;
    if (a.step == 0 && b.step == 0) return visibility::all;
    const auto step = detail::common_step(a.step, b.step);
    return {false, step > 1 && (a.first - b.first) % step != 0};
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator>(A x, B y) {
    return y < x;
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator<=(A x, B y) {
    return !(y < x);
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator>=(A x, B y) {
    return !(x < y);
}

template <detail::RangeOperand A, detail::RangeOperand B>
    requires(std::same_as<A, range> || std::same_as<B, range>)
constexpr visibility operator!=(A x, B y) {
    return !(x == y);
}

template <detail::VisibilityOperand A, detail::VisibilityOperand B>
    requires(std::same_as<A, visibility> || std::same_as<B, visibility>)
constexpr visibility operator&&(A x, B y) {
    return visibility::least(x, y);
}

template <detail::VisibilityOperand A, detail::VisibilityOperand B>
    requires(std::same_as<A, visibility> || std::same_as<B, visibility>)
constexpr visibility operator||(A x, B y) {
    return visibility::greatest(x, y);
}

template <detail::VisibilityOperand A, detail::VisibilityOperand B>
    requires(std::same_as<A, visibility> || std::same_as<B, visibility>)
constexpr visibility operator==(A x, B y) {
    const visibility a(x), b(y);
    return (a && b) || (!a && !b);
}

template <detail::VisibilityOperand A, detail::VisibilityOperand B>
    requires(std::same_as<A, visibility> || std::same_as<B, visibility>)
constexpr visibility operator!=(A x, B y) {
    return !(x == y);
}

} // namespace attn
