// A number that knows how wrong the machine's may be: the definitions, computed in it, bound the errors of the kernels.
#pragma once

#include <attn/core/inputs.hpp>
#include <attn/core/tensor.hpp>
#include <attn/score/score_function.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace attn::fuzz {

/// Half the distance of 1 to the next number: the relative error of one operation.
template <Scalar T>
inline constexpr double unit_of = static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;

/// A number x, in double, and how far from it the same formula may be in T, in whatever order its sums are taken and its products
/// distributed over them. Besides x it holds `size`, the formula's value if no sign cancelled any other, and an error
///     carried + additions unit size
/// of which the first part is what the terms of a sum were wrong by, and the second what adding them rounds: a sum of n terms is at most
/// n - 1 additions deep, each rounding what is at most `size`. Higham 2002, "Accuracy and Stability of Numerical Algorithms", 3.1 and 4.2.
/// Sums and products of whole numbers are exact while T holds them, and so is what 0 is added to. What is not finite is known.
template <Scalar T>
class bounded {
public:
    constexpr bounded() = default;
    /// A number, rounded to T.
    template <class U>
        requires std::is_arithmetic_v<U>
    constexpr bounded(U number)
        : bounded(static_cast<double>(number), magnitude(static_cast<double>(number)),
                  static_cast<double>(static_cast<T>(number)) == static_cast<double>(number) ? 0 : unit * magnitude(static_cast<double>(number))) {}

    /// x.
    constexpr double value() const { return value_; }
    /// How far from it.
    constexpr double error() const { return carried_ + additions_ * unit * size_; }

    friend constexpr bounded operator+(const bounded& a, const bounded& b) {
        if (is_zero(a)) return b;
        if (is_zero(b)) return a;
        if (is_whole(a) && is_whole(b) && a.size_ + b.size_ <= 1 / unit) return {a.value_ + b.value_, a.size_ + b.size_, 0};
        return {a.value_ + b.value_, a.size_ + b.size_, a.carried_ + b.carried_, std::max(a.additions_, b.additions_) + 1};
    }
    friend constexpr bounded operator-(const bounded& a) { return {-a.value_, a.size_, a.carried_, a.additions_}; }
    friend constexpr bounded operator-(const bounded& a, const bounded& b) { return a + -b; }
    friend constexpr bounded operator*(const bounded& a, const bounded& b) {
        const auto size = a.size_ * b.size_;
        if (is_whole(a) && is_whole(b) && size <= 1 / unit) return {a.value_ * b.value_, size, 0};
        return {a.value_ * b.value_, size, a.size_ * b.error() + b.size_ * a.error() + a.error() * b.error() + unit * size + least};
    }
    friend constexpr bounded operator/(const bounded& a, const bounded& b) {
        const auto divisor = magnitude(b.value_), size = a.size_ / divisor;
        const auto error = b.error() < divisor ? (a.error() + size * b.error()) / (divisor - b.error()) : infinite;
        return {a.value_ / b.value_, size, error + unit * size + least};
    }
    constexpr bounded& operator+=(const bounded& b) { return *this = *this + b; }
    constexpr bounded& operator-=(const bounded& b) { return *this = *this - b; }
    constexpr bounded& operator*=(const bounded& b) { return *this = *this * b; }
    constexpr bounded& operator/=(const bounded& b) { return *this = *this / b; }

    friend constexpr bool operator==(const bounded& a, const bounded& b) { return a.value_ == b.value_; }
    friend constexpr auto operator<=>(const bounded& a, const bounded& b) { return a.value_ <=> b.value_; }
    friend constexpr bounded select(bool condition, const bounded& a, const bounded& b) { return condition ? a : b; }
    friend bool isnan(const bounded& a) { return std::isnan(a.value_); }

    friend constexpr bounded abs(const bounded& a) { return a.value_ < 0 ? -a : a; }
    friend constexpr bounded max(const bounded& a, const bounded& b) { return a < b ? b : a; }
    friend constexpr bounded min(const bounded& a, const bounded& b) { return b < a ? b : a; }
    friend constexpr bounded fma(const bounded& a, const bounded& b, const bounded& c) { return a * b + c; }

    // A function f is wrong by what its argument is, times its slope there, and by a few units of its own. Exponentials are of
    // arguments that a factor has rounded.
    friend bounded exp(const bounded& a) {
        const auto y = std::exp(a.value_), error = a.error() + 4 * unit * magnitude(a.value_);
        return of(y, error < 1 ? y * std::expm1(error) : std::exp(a.value_ + error));
    }
    friend bounded log(const bounded& a) { return of(std::log(a.value_), log_error(a.value_, a.error())); }
    friend bounded log1p(const bounded& a) { return of(std::log1p(a.value_), log_error(1 + a.value_, a.error())); }
    friend bounded sqrt(const bounded& a) {
        const auto y = std::sqrt(a.value_);
        return of(y, a.error() < a.value_ ? y - std::sqrt(a.value_ - a.error()) : std::sqrt(a.value_ + a.error()));
    }
    friend bounded tanh(const bounded& a) {
        const auto y = std::tanh(a.value_), nearest = std::max(0.0, magnitude(a.value_) - a.error());
        return of(y, a.error() * (1 - std::tanh(nearest) * std::tanh(nearest)));
    }
    friend bounded erf(const bounded& a) {
        const auto nearest = std::max(0.0, magnitude(a.value_) - a.error());
        return of(std::erf(a.value_), a.error() * 2 * std::numbers::inv_sqrtpi * std::exp(-nearest * nearest));
    }
    /// Of a base above 0; the exponent is exact.
    friend bounded pow(const bounded& a, const bounded& b) {
        const auto y = std::pow(a.value_, b.value_);
        return of(y, magnitude(y) * std::expm1(magnitude(b.value_) * (log_error(a.value_, a.error()) + 4 * unit * magnitude(std::log(a.value_)))));
    }

private:
    static constexpr double unit = unit_of<T>, least = static_cast<double>(std::numeric_limits<T>::min()), infinite = std::numeric_limits<double>::infinity();

    constexpr bounded(double value, double size, double carried, double additions = 0)
        : value_(value), size_(magnitude(value) < infinite ? size : 0), carried_(!(magnitude(value) < infinite) ? 0 : carried < infinite ? carried : infinite),
          additions_(additions) {}
    static bounded of(double value, double carried) { return {value, magnitude(value), carried + 8 * unit * magnitude(value) + least}; }
    static constexpr double magnitude(double x) { return x < 0 ? -x : x; }
    static constexpr bool is_zero(const bounded& a) { return a.value_ == 0 && a.size_ == 0 && a.carried_ == 0; }
    static constexpr bool is_whole(const bounded& a) {
        return a.carried_ == 0 && a.additions_ == 0 && a.size_ <= 1 / unit && magnitude(a.value_) <= 1 / unit && static_cast<double>(static_cast<std::int64_t>(a.value_)) == a.value_;
    }
    static double log_error(double x, double error) { return error < x ? -std::log1p(-error / x) : infinite; }

    double value_ = 0, size_ = 0, carried_ = 0, additions_ = 0;
};

/// The tensor, exact.
template <Scalar T, Scalar U = T>
tensor<bounded<T>> bounded_copy(const std::type_identity_t<tensor_view<const U>>& from) {
    tensor<bounded<T>> to(from.shape());
    const auto [batch, heads, tokens, channels] = from.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < tokens; ++i)
                for (index_t c = 0; c < channels; ++c) to(b, h, i, c) = from(b, h, i, c);
    return to;
}

/// Writes what a definition is wrong by, some times: define(inputs, outputs) computes it in numbers that know.
template <Scalar T>
void write_bounds(const inputs<double>& in, const outputs<double>& bounds, const auto& define, double times = 1) {
    const auto copy = [](const stored_view<const double>& from) { return bounded_copy<T, double>(from.numbers()); };
    const auto q = copy(in.queries), k = copy(in.keys), v = copy(in.values);
    tensor<bounded<T>> out(bounds.values.shape());
    define(inputs<bounded<T>>{q, k, v, in.positions}, outputs<bounded<T>>{out});
    attn::detail::for_each_number(out.shape(), [&](index_t b, index_t h, index_t i, index_t c) { bounds.values(b, h, i, c) = times * out(b, h, i, c).error(); });
}

} // namespace attn::fuzz

template <class T>
class std::numeric_limits<attn::fuzz::bounded<T>> : public std::numeric_limits<double> {
public:
    static constexpr attn::fuzz::bounded<T> infinity() { return std::numeric_limits<T>::infinity(); }
};
template <class T>
inline constexpr bool attn::detail::is_score_number<attn::fuzz::bounded<T>> = true;
