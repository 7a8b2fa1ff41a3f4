// e^x for the softmax: the exponential of a score minus its row's maximum.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

#include <array>
#include <limits>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

/// 2^f = 1 + c1 f + c2 f^2 + ... on [-1/2, 1/2], minimax in relative error with c0 = 1 fixed, so that 2^0 is exactly 1.
template <Scalar T>
inline constexpr auto exp2_coefficients = [] {
    if constexpr (sizeof(T) == 4) { // degree 6: 2.6e-9
        return std::array<T, 6>{0.6931472149680279f,   0.24022652782887738f,   0.05550310551013797f,
                                0.009617692972993062f, 0.0013406643902351759f, 0.00015594678161326619f};
    } else { // degree 11: 1.8e-17
        return std::array<T, 11>{0.69314718055994569675,   0.24022650695910098007,   0.055504108664790394552,    0.0096181291076070023796,
                                 0.0013333558153439964747, 0.0001540353044157213033, 0.000015252727385193868197, 1.3215442675329822143e-6,
                                 1.0180647659234138888e-7, 7.0725704128144235096e-9, 4.078071929588336665e-10};
    }
}();

/// The polynomial by pairs of terms (Estrin): a shorter chain of multiply-adds than Horner's, at one more multiplication.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp2_polynomial(lanes<T> f) {
    using lanes = simd::lanes<T>;
    constexpr auto& c = exp2_coefficients<T>;
    const auto square = f * f;
    lanes p;
    unroll<static_cast<int>(c.size() / 2)>([&](auto pair) {
        constexpr auto i = c.size() / 2 * 2 - 2 - 2 * static_cast<std::size_t>(pair());
        const auto terms = fma(lanes(c[i + 1]), f, lanes(c[i]));
        if constexpr (pair() > 0) p = fma(p, square, terms);
        else if constexpr (c.size() % 2 == 1) p = fma(lanes(c.back()), square, terms);
        else p = terms;
    });
    return fma(p, f, lanes(T{1}));
}

/// Adding it rounds to a sixteenth and leaves its number in the low bits.
template <Scalar T>
inline constexpr T sixteenths = static_cast<T>(std::int64_t{3} << (std::numeric_limits<T>::digits - 6));

/// 2^(i / 16).
template <Scalar T>
inline constexpr std::array<T, 16> exp2_of_sixteenths{T(1.0L),
                                                      T(1.0442737824274138403L),
                                                      T(1.0905077326652576592L),
                                                      T(1.1387886347566916537L),
                                                      T(1.1892071150027210667L),
                                                      T(1.2418578120734840486L),
                                                      T(1.2968395546510096659L),
                                                      T(1.3542555469368927283L),
                                                      T(1.4142135623730950488L),
                                                      T(1.4768261459394993114L),
                                                      T(1.5422108254079408236L),
                                                      T(1.6104903319492543082L),
                                                      T(1.6817928305074290861L),
                                                      T(1.7562521603732994831L),
                                                      T(1.8340080864093424635L),
                                                      T(1.9152065613971472939L)};

/// (2^f - 1) / f on [-1/32, 1/32], minimax: 1.6e-9 of 2^f for floats, 7e-18 for doubles.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp2_slope(lanes<T> f) {
    using lanes = simd::lanes<T>;
    if constexpr (sizeof(T) == 4) {
        return fma(fma(lanes(0.055502136502530324f), f, lanes(0.2402342880139462972f)), f, lanes(0.69314718266662967f));
    } else {
        const auto square = f * f;
        const auto low = fma(lanes(0.24022650695909906875), f, lanes(0.69314718055994685065));
        const auto middle = fma(lanes(0.0096181291121920692372), f, lanes(0.055504108652133563097));
        const auto high = fma(lanes(0.00015403348281360884665), f, lanes(0.0013333818526483619751));
        return fma(fma(high, square, middle), square, low);
    }
}

} // namespace detail

/// e^x for x <= 0: e^0 is exactly 1, e^-infinity is 0, NaN stays NaN. Where the result would be subnormal it is 0. A third of
/// the time of xsimd's exp, which covers signs and ranges that a softmax never meets.
///     x log2(e) = k + f,   e^x = 2^k 2^f
/// The error is at most two units in the last place and |x| times the relative error of the number log2(e), which is less than half a unit:
/// a weight that far below the largest counts that much less. Where multiply-adds round twice, half a unit of x log2(e) comes to it.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp_nonpositive(lanes<T> x) {
    using lanes = simd::lanes<T>;
    const lanes log2e = std::numbers::log2e_v<T>;
    constexpr T lowest = static_cast<T>((std::numeric_limits<T>::min_exponent - 1) * std::numbers::ln2_v<double>);
#if defined(__AVX512F__)
    // A register holds 2^(i/16), so that the polynomial has half the terms: k is a multiple of a sixteenth, whose fraction picks the
    // factor. 4 cycles a register of floats. Scaling takes the floor of k; lanes whose result would be subnormal are left out of it and are
    // 0: many processors take a hundred cycles for a multiply-add with such a number. A NaN is not less than anything, and stays.
    using batch = typename lanes::batch;
    // Unmasked forms make gcc 12 warn in its own header.
    constexpr auto all = static_cast<typename xsimd::batch_bool<T>::register_type>(~0u);
    const lanes magic = detail::sixteenths<T>, smallest = lowest;
    const lanes shifted = fma(x, log2e, magic), k = shifted - magic, f = fma(x, log2e, -k);
    const T* const table = detail::exp2_of_sixteenths<T>.data();
    if constexpr (sizeof(T) == 4) {
        const lanes power = batch(_mm512_maskz_permutexvar_ps(all, _mm512_castps_si512(shifted.value), _mm512_loadu_ps(table)));
        const lanes p = fma(detail::exp2_slope<T>(f), f * power, power);
        return batch(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.value, smallest.value, _CMP_NLT_UQ), p.value, k.value));
    } else {
        const lanes power =
            batch(_mm512_permutex2var_pd(_mm512_loadu_pd(table), _mm512_castpd_si512(shifted.value), _mm512_loadu_pd(table + 8)));
        const lanes p = fma(detail::exp2_slope<T>(f), f * power, power);
        return batch(_mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x.value, smallest.value, _CMP_NLT_UQ), p.value, k.value));
    }
#else
    using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
    using integers = xsimd::batch<integer>;
    constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
    // Adding 1.5 * 2^mantissa_bits rounds to an integer and leaves it in the low bits: cheaper than a conversion there and back.
    const lanes magic = static_cast<T>(integer{3} << (mantissa_bits - 1));
    const auto kept = max_or_second(lanes(lowest), x); // a NaN is the second, and stays
    const auto shifted = fma(kept, log2e, magic), k = shifted - magic;
    const auto p = detail::exp2_polynomial(fma(kept, log2e, -k));
    const auto exponent = std::bit_cast<integers>(shifted.value) << mantissa_bits;
    const lanes result = std::bit_cast<typename lanes::batch>(std::bit_cast<integers>(p.value) + exponent);
    // The bits of a NaN may have become those of a number: 0 times it is NaN still.
    return select(x < lanes(lowest), lanes(T{0}), fma(kept, lanes(T{0}), result));
#endif
}

} // namespace attn::simd
