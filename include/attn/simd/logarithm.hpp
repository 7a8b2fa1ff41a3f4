// log, log1p and pow of registers.
#pragma once

#include "exponential.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

/// A positive number's logarithm in pieces: x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)), s = f / (2 + f), and the tail of
///     log(1 + f) = 2 s + s z Q(z),   z = s^2,   Q minimax in relative error of the whole: 4e-10 for floats, 1.6e-18 for doubles
template <Scalar T>
struct log_argument {
    lanes<T> k, f, s, z_q;

    explicit log_argument(lanes<T> x) {
        constexpr int raised = mantissa_bits<T> + 2;
        constexpr auto root_half = std::bit_cast<integer_of<T>>(static_cast<T>(std::numbers::sqrt2 / 2));
        const auto subnormal = x < lanes<T>(std::numeric_limits<T>::min());
        const auto bits = bits_of(select(subnormal, x * lanes<T>(first_whole<T> * T{4}), x)) + (one_bits<T> - root_half);
        const auto biased =
            number_of<T>((bits >> mantissa_bits<T>) | std::bit_cast<integer_of<T>>(first_whole<T>)) - lanes<T>(first_whole<T>);
        constexpr T bias = std::numeric_limits<T>::max_exponent - 1;
        k = biased - select(subnormal, lanes<T>(bias + raised), lanes<T>(bias));
        f = number_of<T>((bits & mantissa_mask<T>)+root_half) - lanes<T>(T{1});
        s = f / (lanes<T>(T{2}) + f);
        const auto z = s * s;
        constexpr auto q = [] {
            if constexpr (sizeof(T) == 4) return std::array<T, 4>{0.6666666269f, 0.4000033736f, 0.2853723764f, 0.2358357459f};
            else
                return std::array<T, 7>{0.666666666666673513, 0.399999999994110789, 0.285714287432659864, 0.222221984756868052,
                                        0.181835697531622403, 0.1531390295740514,   0.147975101388944763};
        }();
        z_q = z * polynomial(q, z);
    }
};

} // namespace detail

/// The natural logarithm, at most 1 unit in the last place off; -infinity of 0, NaN below.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> log(lanes<T> x) {
    using lanes = simd::lanes<T>;
    const detail::log_argument<T> a(x);
    const auto half_square = a.f * lanes(T{0.5}) * a.f;
    const auto low = fma(a.s, half_square + a.z_q, a.k * lanes(detail::ln2<T>[1]));
    const auto result = fma(a.k, lanes(detail::ln2<T>[0]), a.f - (half_square - low));
    const auto special = select(x == lanes(T{0}), lanes(-detail::infinity<T>), lanes(std::numeric_limits<T>::quiet_NaN()));
    return select(x > lanes(T{0}), select(x == lanes(detail::infinity<T>), x, result), special);
}

/// log(1 + x), also near 0.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> log1p(lanes<T> x) {
    using lanes = simd::lanes<T>;
    const auto sum = x + lanes(T{1}), lost = x - (sum - lanes(T{1}));
    const auto result = log(sum) + lost / sum;
    return select(x == lanes(detail::infinity<T>) || sum == lanes(T{0}), log(sum), select(sum == lanes(T{1}), x, result));
}

/// x to the power of y, with the special values of C's pow: 1 for y = 0 and for x = 1, whatever the other is; NaN for a negative x and a y
/// that is no integer. The logarithm is kept in two numbers, so the error is at most 3 units in the last place where
/// multiply-adds round once, 8 elsewhere.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> pow(lanes<T> x, std::type_identity_t<lanes<T>> y) {
    using lanes = simd::lanes<T>;
    const lanes zero = T{0}, one = T{1}, half = T{0.5}, all = detail::infinity<T>, whole = detail::first_whole<T>;
    const auto size = abs(x);
    const detail::log_argument<T> a(size);
    // s has an error, which a division by the same number finds.
    const auto divisor = lanes(T{2}) + a.f, lost = a.f - (divisor - lanes(T{2}));
    const auto back = a.s * divisor, s_low = fma(-a.s, lost, (a.f - back) - detail::lost_by(back, a.s, divisor)) / divisor;
    const auto of_exponent = a.k * lanes(detail::ln2<T>[0]), twice = a.s + a.s, sum = of_exponent + twice;
    const auto tail = fma(a.k, lanes(detail::ln2<T>[1]), fma(a.s, a.z_q, s_low + s_low)) + (twice - (sum - of_exponent));
    const auto high = sum + tail, low = tail - (high - sum);
    const auto product = y * high, kept = detail::kept_for_exp(product);
    const auto rest = select(kept == product && product != zero, fma(y, low, detail::lost_by(product, y, high)), zero);
    const detail::exp_argument<T> power(kept);
    const auto factor = one + detail::expm1_small(power.r);
    auto result = detail::scaled(power.k, fma(factor, rest, factor));

    const auto grows = (size > one && y > zero) || (size < one && y < zero), shrinks = (size > one && y < zero) || (size < one && y > zero);
    const auto extreme = size == zero || size == all || abs(y) == all;
    result = select(extreme && grows, all, select(extreme && shrinks, zero, select(extreme && size == one, one, result)));
    const auto is_integer = [&](lanes v) { return v >= whole || (v + whole) - whole == v; };
    const auto negative = x < zero || one / x < zero;
    const auto odd = is_integer(abs(y)) && !is_integer(abs(y) * half);
    result = select(negative && odd, -result, result);
    result = select(x < zero && size < all && abs(y) < all && !is_integer(abs(y)), lanes(std::numeric_limits<T>::quiet_NaN()), result);
    return select(y == zero || x == one, one, select(x == x, result, x));
}
template <Scalar T, class U>
    requires std::is_arithmetic_v<U>
[[gnu::always_inline]] inline lanes<T> pow(U x, lanes<T> y) {
    return pow(lanes<T>(x), y);
}

} // namespace attn::simd
