// Registers of numbers from integers of 8 and of 4 bits.
#pragma once

#include "lanes.hpp"

#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// As many integers of 32 bits as a register of T has numbers, from bytes in memory.
template <Scalar T>
struct small_integers {
    static constexpr int size = lanes<T>::size;
    using vector = typename detail::vector_of<std::int32_t, size>::type;

    vector value;

    /// Of bytes with a sign, or without. By the instruction set's widening, which gcc 12 does not find.
    template <bool has_sign>
    static small_integers load(const std::byte* from) {
#if defined(__AVX512F__)
        if constexpr (size == 16) {
            const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            return {reinterpret_cast<vector>(has_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes))};
        }
#endif
#if defined(__AVX2__)
        if constexpr (size == 8) {
            const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
            return {reinterpret_cast<vector>(has_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes))};
        }
#endif
#if defined(__SSE2__)
        if constexpr (size == 4) {
            std::int32_t all;
            std::memcpy(&all, from, sizeof all);
            const auto zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128(all);
            const auto wide = _mm_unpacklo_epi16(zero, _mm_unpacklo_epi8(zero, bytes)); // in the uppermost byte
            return {reinterpret_cast<vector>(has_sign ? _mm_srai_epi32(wide, 24) : _mm_srli_epi32(wide, 24))};
        }
#endif
        small_integers result;
        for (int l = 0; l < size; ++l) {
            const auto byte = std::to_integer<std::uint8_t>(from[l]);
            result.value[l] = has_sign ? static_cast<std::int8_t>(byte) : byte;
        }
        return result;
    }
    /// The numbers of the four lowest bits of each, or of the four above them if `from` is 4, of bytes without a sign. A shift of each lane
    /// and a permutation of 16 numbers, which looks at four bits, where a register has them: two instructions for the four of integers.
    lanes<T> four_bits(int from) const {
#if defined(__AVX512F__)
        if constexpr (size == 16) {
            const auto numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            const auto bits = _mm512_srlv_epi32(reinterpret_cast<__m512i>(value), _mm512_set1_epi32(from));
            return std::bit_cast<lanes<T>>(_mm512_permutexvar_ps(bits, numbers));
        }
#endif
        return small_integers{(value >> from) & 15}.numbers();
    }
    /// The same numbers in T.
    lanes<T> numbers() const {
        if constexpr (std::same_as<T, float>) {
            return std::bit_cast<lanes<T>>(__builtin_convertvector(value, typename detail::vector_of<float, size>::type));
        } else {
            T all[std::size_t{size}];
            for (int l = 0; l < size; ++l) all[l] = static_cast<T>(value[l]);
            return lanes<T>::load(all);
        }
    }
};

/// A register of T from as many floats.
template <Scalar T>
lanes<T> load_floats(const float* from) {
    if constexpr (std::same_as<T, float>) {
        return lanes<T>::load(from);
    } else {
        T all[std::size_t{lanes<T>::size}];
        for (int l = 0; l < lanes<T>::size; ++l) all[l] = static_cast<T>(from[l]);
        return lanes<T>::load(all);
    }
}

} // namespace attn::simd

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
