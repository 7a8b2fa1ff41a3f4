// sin and cos of registers.
#pragma once

#include "exponential.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

/// The nearest integer, of any size.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> nearest_integer(lanes<T> x) {
    const lanes<T> whole = first_whole<T>, size = abs(x);
    return with_sign_of(select(size < whole, (size + whole) - whole, size), x);
}

/// x = n pi / 2 + high + low, n known modulo 4, |high| at most pi / 4 and a little more.
template <Scalar T>
struct turned_lanes {
    lanes<T> high, low, quarter;

    explicit turned_lanes(lanes<T> x) : high(x), low(T{0}), quarter(T{0}) {
        // Of a large number the first step leaves what the second can do with.
        turn_back();
        turn_back();
    }

private:
    /// pi / 2 in three numbers, of which the product of the first with an integer, taken off what is near it, is exact.
    static constexpr std::array<T, 3> half_pi =
        sizeof(T) == 4 ? std::array<T, 3>{T(0x1.921fb6p+0), T(-0x1.777a5cp-25), T(-0x1.ee59dap-50)}
                       : std::array<T, 3>{T(0x1.921fb54442d18p+0), T(0x1.1a62633145c07p-54), T(-0x1.f1976b7ed8fbcp-110)};

    void turn_back() {
        const auto k = nearest_integer(high * lanes<T>(static_cast<T>(2 * std::numbers::inv_pi)));
        const auto turns = k * lanes<T>(half_pi[0]), first = (high - turns) - lost_by(turns, k, lanes<T>(half_pi[0]));
        const auto second = k * lanes<T>(half_pi[1]), lost = lost_by(second, k, lanes<T>(half_pi[1]));
        // first - second is sum and error (Knuth).
        const auto sum = first - second, back = sum - first, error = (first - (sum - back)) - (second + back);
        const auto rest = fma(-k, lanes<T>(half_pi[2]), low + (error - lost));
        high = sum + rest;
        const auto added = high - sum;
        low = (sum - (high - added)) + (rest - added);
        quarter += k - lanes<T>(T{4}) * nearest_integer(k * lanes<T>(T{0.25}));
    }
};

/// sin(x + n pi / 2): minimax polynomials of x^2 for the sine and the cosine of what is left of x.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> sin_of_turned(lanes<T> x, T n) {
    using lanes = simd::lanes<T>;
    constexpr auto of_sine = [] {
        if constexpr (sizeof(T) == 4) return std::array<T, 4>{-0.1666666716f, 0.008333329111f, -0.0001983932743f, 2.718237283e-6f};
        else
            return std::array<T, 7>{-0.166666666666666657,   0.00833333333333332281,  -0.000198412698412549904, 2.75573192141488669e-6,
                                    -2.50521049005427499e-8, 1.60583651935726067e-10, -7.57862551182946351e-13};
    }();
    constexpr auto of_cosine = [] {
        if constexpr (sizeof(T) == 4) return std::array<T, 4>{0.04166666791f, -0.00138888834f, 2.479951218e-5f, -2.72095491e-7f};
        else
            return std::array<T, 7>{0.0416666666666666644,  -0.00138888888888888742,  2.48015873015713807e-5, -2.75573192153256064e-7,
                                    2.08767543546454422e-9, -1.14702919379951576e-11, 4.73804818175484167e-14};
    }();
    const turned_lanes<T> a(x);
    const auto square = a.high * a.high, half = square * lanes(T{0.5}), one = lanes(T{1}), below = one - half;
    const auto sine = a.high + fma(a.high * square, polynomial(of_sine, square), a.low * below);
    const auto cosine = below + fma(square * square, polynomial(of_cosine, square), fma(-a.high, a.low, (one - below) - half));
    const auto quarter = bits_of(rounded_lanes<T>{a.quarter + lanes(n + rounded_lanes<T>::magic)}.shifted);
    constexpr auto lowest = integer_of<T>{1};
    const auto is_cosine = number_of<T>((-(quarter & lowest)) & one_bits<T>) == one; // 0 or 1 as a number
    const auto minus = (quarter & (lowest << 1)) << (sizeof(T) * 8 - 2);
    const auto result = number_of<T>(bits_of(select(is_cosine, cosine, sine)) ^ minus);
    // Beyond, pi would need more digits.
    const lanes farthest = static_cast<T>(sizeof(T) == 4 ? 0x1p40 : 0x1p64);
    return select(abs(x) <= farthest, result, lanes(std::numeric_limits<T>::quiet_NaN()));
}

} // namespace detail

/// The sine of an angle in radians: at most 1 unit in the last place off where |x| is at most 2^20 (2^53 for doubles), at most one of
/// the number 1 up to 2^40 (2^64), and NaN beyond.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> sin(lanes<T> x) {
    const auto result = detail::sin_of_turned<T>(x, 0);
    return select(x == lanes<T>(T{0}), x, result); // -0 too
}

/// The cosine, as sin.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> cos(lanes<T> x) {
    return detail::sin_of_turned<T>(x, 1);
}

} // namespace attn::simd
