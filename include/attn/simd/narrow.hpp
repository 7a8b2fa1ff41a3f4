// Registers of floats from 16-bit numbers, and back.
#pragma once

#include "../core/storage.hpp"
#include "lane_mask.hpp"
#include "lanes.hpp"

#include <array>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// A register of floats from as many 16-bit numbers in memory, and back, as detail::widened and detail::narrowed have them: by the
/// instruction set's conversions, or by integers of 32 bits where it has none. Subnormal numbers are kept on all of them: the instruction
/// that narrows to bfloat16 would flush them. No instruction raises a trap that a program did not ask for.
template <narrow_format format>
struct narrow_lanes {
    /// Depends on the format, so that what is written for registers of another size is left out before it is looked at.
    using batch = xsimd::batch<std::conditional_t<format == narrow_format::none, double, float>>;
    static constexpr auto size = batch::size;

    static batch widen(const std::uint16_t* from) {
#if defined(__AVX512BW__)
        if constexpr (size == 16) {
            const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            if constexpr (format == narrow_format::half) return batch(_mm512_cvtph_ps(bits));
            else { // number e becomes the upper half of lane e
                const auto places =
                    _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
                return batch(_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, _mm512_castsi256_si512(bits))));
            }
        }
#endif
#if defined(__AVX2__)
        if constexpr (size == 8) {
            const auto bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
#if defined(__F16C__)
            if constexpr (format == narrow_format::half) return batch(_mm256_cvtph_ps(bits));
#endif
            if constexpr (format == narrow_format::bfloat16)
                return batch(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
        }
#endif
#if defined(__SSE2__)
        if constexpr (size == 4) {
            const auto bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), zero = _mm_setzero_si128();
            if constexpr (format == narrow_format::bfloat16) return batch(_mm_castsi128_ps(_mm_unpacklo_epi16(zero, bits)));
            else {
                const auto wide = _mm_unpacklo_epi16(bits, zero), sign = _mm_slli_epi32(_mm_and_si128(wide, _mm_set1_epi32(0x8000)), 16);
                const auto rest = _mm_slli_epi32(_mm_and_si128(wide, _mm_set1_epi32(0x7fff)), 13);
                const auto where = [&](int least, int then) {
                    return _mm_and_si128(_mm_cmpgt_epi32(rest, _mm_set1_epi32(least - 1)), _mm_set1_epi32(then));
                };
                const auto or_three = _mm_or_si128(sign, _mm_or_si128(where(0x0f800000, 0x7f800000), where(0x0f800001, 0x00400000)));
                return batch(_mm_or_ps(_mm_mul_ps(_mm_castsi128_ps(rest), _mm_set1_ps(0x1p112F)), _mm_castsi128_ps(or_three)));
            }
        }
#endif
#if defined(__aarch64__)
        if constexpr (std::same_as<batch, xsimd::batch<float, xsimd::neon64>>) {
            const auto bits = vld1_u16(from);
            if constexpr (format == narrow_format::half) return batch(vcvt_f32_f16(vreinterpret_f16_u16(bits)));
            else return batch(vreinterpretq_f32_u32(vshll_n_u16(bits, 16)));
        }
#endif
        float numbers[size];
        for (std::size_t l = 0; l < size; ++l) numbers[l] = attn::detail::widened<format>(from[l]);
        return batch::load_unaligned(numbers);
    }

    /// streaming: past the caches, where the instruction set can, to whole registers of an aligned row; then finish_streaming.
    template <bool streaming = false>
    static void narrow(batch x, std::uint16_t* to) {
#if defined(__AVX512BW__)
        if constexpr (size == 16) {
            const auto store = [to](__m256i rounded) {
                auto* const at = reinterpret_cast<__m256i*>(to);
                if constexpr (streaming) _mm256_stream_si256(at, rounded);
                else _mm256_storeu_si256(at, rounded);
            };
            if constexpr (format == narrow_format::half)
                return store(_mm512_maskz_cvtps_ph(static_cast<__mmask16>(~0u), x, _MM_FROUND_TO_NEAREST_INT));
            else {
                const auto bits = _mm512_castps_si512(x);
                const auto odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
                auto rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
                rounded = _mm512_mask_sub_epi32(rounded, odd, rounded, _mm512_set1_epi32(-1));
                rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x00400000));
                const auto upper_halves = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23,
                                                           21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
                return store(_mm512_castsi512_si256(_mm512_permutexvar_epi16(upper_halves, rounded)));
            }
        }
#endif
#if defined(__AVX2__)
        if constexpr (size == 8) {
            const auto store = [to](__m128i rounded) {
                auto* const at = reinterpret_cast<__m128i*>(to);
                if constexpr (streaming) _mm_stream_si128(at, rounded);
                else _mm_storeu_si128(at, rounded);
            };
#if defined(__F16C__)
            if constexpr (format == narrow_format::half) return store(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#endif
            if constexpr (format == narrow_format::bfloat16) {
                const auto bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
                const auto half = _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
                const auto rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16),
                           nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x0040));
                const auto chosen = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
                return store(_mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1)));
            }
        }
#endif
#if defined(__SSE2__)
        if constexpr (size == 4) {
            const auto bits = _mm_castps_si128(x), magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
            const auto choose = [](__m128i condition, __m128i yes, __m128i no) {
                return _mm_or_si128(_mm_and_si128(condition, yes), _mm_andnot_si128(condition, no));
            };
            const auto above = [&](int number) { return _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(number)); };
            const auto rounded_at = [&](int bit, int bias) { // of magnitude + bias
                const auto odd = _mm_and_si128(_mm_srl_epi32(magnitude, _mm_cvtsi32_si128(bit)), _mm_set1_epi32(1));
                return _mm_srl_epi32(_mm_add_epi32(_mm_add_epi32(magnitude, _mm_set1_epi32(bias + (1 << (bit - 1)) - 1)), odd),
                                     _mm_cvtsi32_si128(bit));
            };
            __m128i rounded;
            if constexpr (format == narrow_format::bfloat16)
                rounded = choose(above(0x7f800000), _mm_or_si128(_mm_srli_epi32(magnitude, 16), _mm_set1_epi32(0x0040)), rounded_at(16, 0));
            else {
                const auto subnormal =
                    _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0.5F))), _mm_set1_epi32(0x3f000000));
                const auto nan = _mm_or_si128(_mm_and_si128(_mm_srli_epi32(magnitude, 13), _mm_set1_epi32(0x3ff)), _mm_set1_epi32(0x7e00));
                rounded = choose(above(0x387fffff), rounded_at(13, -0x38000000), subnormal);
                rounded = choose(above(0x477fefff), choose(above(0x7f800000), nan, _mm_set1_epi32(0x7c00)), rounded);
            }
            // To 16 bits by the packing that there is, of signed numbers.
            const auto all = _mm_or_si128(rounded, _mm_srli_epi32(_mm_and_si128(bits, _mm_set1_epi32(static_cast<int>(0x80000000))), 16));
            const auto is_signed = _mm_srai_epi32(_mm_slli_epi32(all, 16), 16);
            return _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(is_signed, is_signed));
        }
#endif
#if defined(__aarch64__)
        if constexpr (std::same_as<batch, xsimd::batch<float, xsimd::neon64>>) {
            if constexpr (format == narrow_format::half) return vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x)));
            else {
                const auto bits = vreinterpretq_u32_f32(x), upper = vshrq_n_u32(bits, 16);
                const auto half = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
                const auto rounded = vshrq_n_u32(vaddq_u32(bits, half), 16), nan = vorrq_u32(upper, vdupq_n_u32(0x0040));
                return vst1_u16(to, vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, nan)));
            }
        }
#endif
        float numbers[size];
        x.store_unaligned(numbers);
        for (std::size_t l = 0; l < size; ++l) to[l] = attn::detail::narrowed<format>(numbers[l]);
    }
};

/// 16-bit numbers as they are stored: a register of them is one of floats.
template <narrow_format format>
struct operand_traits<attn::detail::narrow_number<format>> {
    using number = attn::detail::narrow_number<format>;
    struct lanes {
        static simd::lanes<float> load(const number* from) {
            return narrow_lanes<format>::widen(reinterpret_cast<const std::uint16_t*>(from));
        }
        /// The first `count` of them, 0 in the others; reads no further.
        static simd::lanes<float> load_first(const number* from, index_t count) {
            std::array<std::uint16_t, simd::lanes<float>::batch::size> present{};
            std::memcpy(present.data(), from, static_cast<std::size_t>(count) * 2);
            return narrow_lanes<format>::widen(present.data());
        }
    };
};

} // namespace attn::simd

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
