// Numbers with a derivative: what a score function's text is evaluated on to learn its slope.
#pragma once

#include "composed_score.hpp"

#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace dual_numbers {

/// A dual number: a value, and its derivative along one direction. V: a number, or a register of them. Arithmetic follows the rules of
/// calculus, so a generic text evaluated on (score, 1) gives the function's value and its slope:
///     f(x + x' e) = f(x) + f'(x) x' e,      e^2 = 0
/// Comparisons look at values. At a kink, where there is no derivative: abs has 0, max and min have that of their first argument.
/// Numbers, and what converts to V, have the derivative 0. A derivative of exactly 0 stays 0 through an infinite slope (the root of a
/// constant 0), and a slope of exactly 0 makes 0 of an infinite derivative (tanh far from 0): limits, where the product would be NaN.
/// Clifford 1873; Wengert 1964 (forward differentiation).
template <class V>
struct dual {
    V value{};      ///< the number
    V derivative{}; ///< its derivative

    constexpr dual() = default;
    /// A number with its derivative.
    constexpr dual(V of_value, V of_derivative) : value(of_value), derivative(of_derivative) {}
    /// A constant, whose derivative is 0.
    template <class U>
        requires(std::convertible_to<const U&, V>)
    constexpr dual(const U& constant) : value(static_cast<V>(constant)), derivative(static_cast<V>(0)) {}

    friend constexpr dual operator+(dual a, dual b) { return {a.value + b.value, a.derivative + b.derivative}; }
    friend constexpr dual operator-(dual a, dual b) { return {a.value - b.value, a.derivative - b.derivative}; }
    friend constexpr dual operator*(dual a, dual b) {
        return {a.value * b.value, along(b.value, a.derivative) + along(a.value, b.derivative)};
    }
    friend constexpr dual operator/(dual a, dual b) {
        const V quotient = a.value / b.value;
        return {quotient, over(a.derivative, b.value) - along(quotient, over(b.derivative, b.value))};
    }
    friend constexpr dual operator-(dual a) { return {-a.value, -a.derivative}; }
    constexpr dual& operator+=(dual b) { return *this = *this + b; }
    constexpr dual& operator-=(dual b) { return *this = *this - b; }
    constexpr dual& operator*=(dual b) { return *this = *this * b; }
    constexpr dual& operator/=(dual b) { return *this = *this / b; }
    friend constexpr auto operator<(dual a, dual b) { return a.value < b.value; }
    friend constexpr auto operator>(dual a, dual b) { return a.value > b.value; }
    friend constexpr auto operator<=(dual a, dual b) { return a.value <= b.value; }
    friend constexpr auto operator>=(dual a, dual b) { return a.value >= b.value; }
    friend constexpr auto operator==(dual a, dual b) { return a.value == b.value; }
    friend constexpr auto operator!=(dual a, dual b) { return a.value != b.value; }

    friend constexpr dual select(const auto& condition, dual yes, dual no) {
        return {chosen(condition, yes.value, no.value), chosen(condition, yes.derivative, no.derivative)};
    }
    friend dual abs(dual a) {
        using std::abs;
        const V zero = static_cast<V>(0);
        return {abs(a.value), chosen(a.value < zero, -a.derivative, chosen(a.value > zero, a.derivative, zero))};
    }
    friend constexpr dual max(dual a, dual b) { return select(b.value > a.value, b, a); }
    friend constexpr dual min(dual a, dual b) { return select(b.value < a.value, b, a); }
    friend dual fma(dual a, dual b, dual c) {
        using std::fma;
        return {fma(a.value, b.value, c.value), along(b.value, a.derivative) + (along(a.value, b.derivative) + c.derivative)};
    }
    friend dual exp(dual a) {
        using std::exp;
        const V power = exp(a.value);
        return {power, along(power, a.derivative)};
    }
    friend dual log(dual a) {
        using std::log;
        return {log(a.value), over(a.derivative, a.value)};
    }
    friend dual sqrt(dual a) {
        using std::sqrt;
        const V root = sqrt(a.value);
        return {root, over(a.derivative, root + root)};
    }
    friend dual erf(dual a) {
        using std::erf, std::exp;
        return {erf(a.value), along(static_cast<V>(2 * std::numbers::inv_sqrtpi) * exp(-a.value * a.value), a.derivative)};
    }
    friend dual tanh(dual a) {
        using std::tanh;
        const V t = tanh(a.value);
        return {t, along(static_cast<V>(1) - t * t, a.derivative)};
    }
    /// A constant exponent asks for no logarithm, so that the base may be negative.
    friend dual pow(dual a, dual b) {
        using std::log, std::pow;
        const V power = pow(a.value, b.value), of_base = along(b.value, pow(a.value, b.value - static_cast<V>(1)));
        return {power, along(of_base, a.derivative) + along(along(power, log(a.value)), b.derivative)};
    }

private:
    /// slope * derivative, 0 if either is.
    static constexpr V along(V slope, V derivative) {
        const V zero = static_cast<V>(0);
        return chosen(slope == zero, zero, chosen(derivative == zero, zero, slope * derivative));
    }
    /// derivative / by, 0 if the derivative is.
    static constexpr V over(V derivative, V by) {
        const V zero = static_cast<V>(0);
        return chosen(derivative == zero, zero, derivative / by);
    }
    static constexpr V chosen(const auto& condition, V yes, V no) {
        using attn::select;
        return select(condition, yes, no);
    }
};

} // namespace dual_numbers

namespace detail {

/// A score function that says its own slope: derivative(score, query, key), on numbers and on lanes.
template <class F, class V, class Index>
concept HasDerivativeOf = requires(const F& f, const V& score, const Index& query, index_t key) { f.derivative(score, query, key); };

/// What a map of single numbers makes of x, and its slope there: by its text on duals, or what its member derivative(x) says.
template <class V, class F>
dual<V> differentiated(const F& map, const V& x) {
    if constexpr (requires { map.derivative(x); }) return {static_cast<V>(map(x)), static_cast<V>(map.derivative(x))};
    else return static_cast<dual<V>>(map(dual<V>(x, static_cast<V>(1))));
}

/// A score after a score function (one that is left for a head), and its slope there.
template <class V, class F, class Index>
dual<V> differentiated(const F& f, const V& score, const Index& query, index_t key) {
    if constexpr (HasDerivativeOf<F, V, Index>)
        return {static_cast<V>(f(score, query, key)), static_cast<V>(f.derivative(score, query, key))};
    else return static_cast<dual<V>>(f(dual<V>(score, static_cast<V>(1)), query, key));
}

/// A score after several score functions, one after the other, and its slope there.
template <class V, class... F, class Index>
dual<V> differentiated(const composed_score<F...>& chain, const V& score, const Index& query, index_t key) {
    dual<V> x(score, static_cast<V>(1));
    const auto add = [&](const auto& f) {
        const auto next = differentiated(f, x.value, query, key);
        x = {next.value, next.derivative * x.derivative};
    };
    std::apply([&](const auto&... f) { (add(f), ...); }, chain.functions);
    return x;
}

} // namespace detail

} // namespace attn
