// 2^x for the softmax: the exponential of a score minus its row's maximum.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

#include <array>
#include <limits>

namespace attn::simd {

namespace detail {

/// 2^f = 1 + c1 f + c2 f^2 + ... on [-1/2, 1/2], minimax in relative error with c0 = 1 fixed, so that 2^0 is exactly 1.
template <Scalar T>
inline constexpr auto exp2_coefficients = [] {
    if constexpr (sizeof(T) == 4) { // degree 6: 2.6e-9
        return std::array<T, 6>{0.6931472149680279f,    0.24022652782887738f,   0.05550310551013797f,
                                0.009617692972993062f, 0.0013406643902351759f, 0.00015594678161326619f};
    } else { // degree 11: 1.8e-17
        return std::array<T, 11>{0.69314718055994569675,    0.24022650695910098007,    0.055504108664790394552,
                                 0.0096181291076070023796,  0.0013333558153439964747,  0.0001540353044157213033,
                                 0.000015252727385193868197, 1.3215442675329822143e-6, 1.0180647659234138888e-7,
                                 7.0725704128144235096e-9,  4.078071929588336665e-10};
    }
}();

/// The polynomial by pairs of terms (Estrin): a shorter chain of multiply-adds than Horner's, at one more multiplication.
template <Scalar T, class Arch>
[[gnu::always_inline]] inline lanes<T, Arch> exp2_polynomial(lanes<T, Arch> f) {
    using lanes = simd::lanes<T, Arch>;
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

} // namespace detail

/// 2^x to two units in the last place, for x <= 0: 2^0 is exactly 1, 2^-infinity is 0, NaN stays NaN. Where the result would be
/// subnormal it is 0 or the subnormal, as the instruction set does it best. A third of the time of xsimd's exp, which covers signs and ranges that a
/// softmax never meets.
template <Scalar T, class Arch>
[[gnu::always_inline]] inline lanes<T, Arch> exp2_nonpositive(lanes<T, Arch> x) {
    using lanes = simd::lanes<T, Arch>;
#if defined(__AVX512F__)
    // Two instructions round and scale, and scaling by -infinity is 0 even where the polynomial is NaN: 30 % fewer cycles than below.
    if constexpr (std::is_base_of_v<xsimd::avx512f, Arch>) {
        using batch = typename lanes::batch;
        constexpr auto all = static_cast<typename xsimd::batch_bool<T, Arch>::register_type>(~0u); // unmasked forms make gcc 12 warn in its own header
        if constexpr (sizeof(T) == 4) {
            const lanes k = batch(_mm512_maskz_roundscale_ps(all, x.value, _MM_FROUND_TO_NEAREST_INT));
            return batch(_mm512_maskz_scalef_ps(all, detail::exp2_polynomial(x - k).value, k.value));
        } else {
            const lanes k = batch(_mm512_maskz_roundscale_pd(all, x.value, _MM_FROUND_TO_NEAREST_INT));
            return batch(_mm512_maskz_scalef_pd(all, detail::exp2_polynomial(x - k).value, k.value));
        }
    } else
#endif
    {
        using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
        using integers = xsimd::batch<integer, Arch>;
        constexpr T lowest = std::numeric_limits<T>::min_exponent - 1;
        constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
        // Adding 1.5 * 2^mantissa_bits rounds to an integer and leaves it in the low bits: cheaper than a conversion there and back.
        constexpr T magic = static_cast<T>(integer{3} << (mantissa_bits - 1));
        const auto clamped = max_or_second(lanes(lowest), x); // a NaN is the second, and stays
        const auto shifted = clamped + lanes(magic);
        const auto p = detail::exp2_polynomial(clamped - (shifted - lanes(magic)));
        const auto exponent = std::bit_cast<integers>(shifted.value) << mantissa_bits;
        const lanes result = std::bit_cast<typename lanes::batch>(std::bit_cast<integers>(p.value) + exponent);
        return select(x < lanes(lowest), lanes(T{0}), result);
    }
}

} // namespace attn::simd
