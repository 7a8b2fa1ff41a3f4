// e^x for the softmax: the exponential of a score minus its row's maximum.
#pragma once

#include "exponential.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

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

/// 2^(i / 16) for the i in the four lowest bits of each number. Registers hold the table where an instruction looks numbers up in them.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp2_of_sixteenth(lanes<T> shifted) {
    using batch [[maybe_unused]] = typename lanes<T>::batch;
    const T* const table = exp2_of_sixteenths<T>.data();
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return batch(_mm512_maskz_permutexvar_ps(all_lanes<T>, _mm512_castps_si512(shifted.value), _mm512_loadu_ps(table)));
    else return batch(_mm512_permutex2var_pd(_mm512_loadu_pd(table), _mm512_castpd_si512(shifted.value), _mm512_loadu_pd(table + 8)));
#else
#if defined(__AVX2__)
    if constexpr (sizeof(batch) == 32 && sizeof(T) == 4) {
        const auto index = _mm256_castps_si256(shifted.value);
        const auto low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index),
                   high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
        return batch(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))));
    } else if constexpr (sizeof(batch) == 32) {
        return batch(_mm256_i64gather_pd(table, _mm256_and_si256(_mm256_castpd_si256(shifted.value), _mm256_set1_epi64x(15)), 8));
    }
#elif defined(__aarch64__)
    if constexpr (std::same_as<batch, neon_floats>) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(table);
        const auto index = vandq_u32(vreinterpretq_u32_f32(shifted.value), vdupq_n_u32(15));
        const auto of_bytes = vaddq_u32(vmulq_n_u32(index, 0x04040404), vdupq_n_u32(0x03020100));
        return batch(vreinterpretq_f32_u8(vqtbl4q_u8(vld1q_u8_x4(bytes), vreinterpretq_u8_u32(of_bytes))));
    }
#endif
    std::array<T, lanes<T>::size> found;
    shifted.store(found.data());
    for (T& x : found) x = table[std::bit_cast<integer_of<T>>(x) & 15];
    return lanes<T>::load(found.data());
#endif
}

} // namespace detail

/// e^x for x <= 0: e^0 is exactly 1, e^-infinity is 0, NaN stays NaN. Where the result would be within a sixteenth of a power of two of
/// subnormal numbers it is 0. Half of the time of `exp`, which covers signs and ranges that a softmax never meets.
///     x log2(e) = k + f,   k a multiple of 1/16,   e^x = 2^floor(k) 2^(k - floor(k)) 2^f
/// The error is at most two units in the last place and |x| times the relative error of the number log2(e), which is less than half a unit:
/// a weight that far below the largest counts that much less. Where multiply-adds round twice, half a unit of x log2(e) comes to it.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp_nonpositive(lanes<T> x) {
    using lanes = simd::lanes<T>;
    const lanes log2e = std::numbers::log2e_v<T>;
    const lanes magic = detail::rounded_lanes<T>::magic / 16; // adding it rounds to a sixteenth, and leaves its number in the low bits
    const lanes lowest = static_cast<T>((std::numeric_limits<T>::min_exponent - 1 + 0.0625) * std::numbers::ln2_v<double>);
    const lanes shifted = fma(x, log2e, magic), k = shifted - magic, f = fma(x, log2e, -k);
    const lanes power = detail::exp2_of_sixteenth(shifted);
    const lanes p = fma(detail::exp2_slope<T>(f), f * power, power);
#if defined(__AVX512F__)
    // Scaling takes the floor of k. Lanes whose result would be subnormal are left out: many processors take a hundred cycles for a
    // multiply-add with such a number. A NaN is not less than anything, and stays.
    using batch = typename lanes::batch;
    if constexpr (sizeof(T) == 4)
        return batch(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.value, lowest.value, _CMP_NLT_UQ), p.value, k.value));
    else return batch(_mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x.value, lowest.value, _CMP_NLT_UQ), p.value, k.value));
#else
    // The exponent is what the bits of k hold above its sixteenths.
    const auto exponent = (detail::bits_of(shifted) << (detail::mantissa_bits<T> - 4)) & ~detail::mantissa_mask<T>;
    const lanes result = detail::number_of<T>(detail::bits_of(p) + exponent);
    // The bits of a NaN may have become those of a number: 0 times it is NaN still.
    return select(x < lowest, lanes(T{0}), fma(x, lanes(T{0}), result));
#endif
}

} // namespace attn::simd
