// Registers of pairs of bfloat16, whose products are summed in float.
#pragma once

#include "../core/storage.hpp"
#include "lanes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Two bfloat16 that stand next to each other in memory. May lie where numbers of another type lay.
struct [[gnu::may_alias]] bf16_pair {
    std::uint32_t bits; ///< the first in the lower half
};

/// Both numbers times a factor, rounded; 0 where that is subnormal.
inline bf16_pair times(bf16_pair pair, float factor) {
    const auto scaled = [&](std::uint32_t upper_half) {
        const auto bits = attn::detail::narrowed<narrow_format::bfloat16>(std::bit_cast<float>(upper_half) * factor);
        return static_cast<std::uint32_t>((bits & 0x7f80) == 0 ? bits & 0x8000 : bits);
    };
    return {scaled(pair.bits << 16) | scaled(pair.bits & 0xffff0000) << 16};
}

/// A register of pairs, as many as of floats. Rounding to bfloat16 is to nearest even and makes 0 of a subnormal number; a multiply-add,
///     fma(a, b, sum) = a.first b.first + (a.second b.second + sum),
/// rounds after each of its two additions: products of two bfloat16 are exact in float. So it does on every instruction set. AVX512-BF16
/// has an instruction for it, which makes 0 of a subnormal sum too: results of others may differ from its by 2^-126 for each addition.
struct bf16_lanes {
    using floats = lanes<float>;
    static constexpr int size = floats::size;
    typedef std::uint32_t vector __attribute__((vector_size(size * sizeof(std::uint32_t))));
    typedef vector stored __attribute__((aligned(4), may_alias));

    vector bits;

    bf16_lanes() = default;
    explicit bf16_lanes(vector v) : bits(v) {}
    explicit bf16_lanes(bf16_pair pair) : bits(vector{} + pair.bits) {}
    /// The pairs of two registers' numbers, one of each.
    static bf16_lanes of(floats first, floats second) {
#if defined(__AVX512BF16__)
        const auto order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, //
                                            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.value, first.value));
        return bf16_lanes(reinterpret_cast<vector>(_mm512_permutexvar_epi16(order, both)));
#else
        return bf16_lanes(upper_half_rounded(first) >> 16 | (upper_half_rounded(second) & 0xffff0000));
#endif
    }
    /// Pairs of neighbours, of numbers that follow each other in two registers.
    static bf16_lanes of_neighbours(floats low, floats high) {
#if defined(__AVX512BF16__)
        return bf16_lanes(reinterpret_cast<vector>(_mm512_cvtne2ps_pbh(high.value, low.value)));
#else
        return [&]<int... Index>(std::integer_sequence<int, Index...>) {
            const auto a = upper_half_rounded(low), b = upper_half_rounded(high);
            return bf16_lanes(__builtin_shufflevector(a, b, 2 * Index...) >> 16 |
                              (__builtin_shufflevector(a, b, 2 * Index + 1 ...) & 0xffff0000));
        }(std::make_integer_sequence<int, size>{});
#endif
    }

    static bf16_lanes load(const bf16_pair* from) {
        const vector whole = *reinterpret_cast<const stored*>(from); // gcc 14 for AArch64 fails where an argument is aligned by hand
        return bf16_lanes(whole);
    }
    void store(bf16_pair* to) const { *reinterpret_cast<stored*>(to) = bits; }
    /// Loads the first `count` lanes; the others are 0.
    static bf16_lanes load_first(const bf16_pair* from, index_t count) {
        std::array<bf16_pair, static_cast<std::size_t>(size)> present{};
        std::copy_n(from, count, present.data());
        return load(present.data());
    }

    floats first() const { return std::bit_cast<floats>(bits << 16); }
    floats second() const { return std::bit_cast<floats>(bits & 0xffff0000); }

    /// Both numbers of the pairs, one or none: 0 for the others.
    bf16_lanes only(const bool (&kept)[2]) const { return bf16_lanes(bits & ((kept[0] ? 0x0000ffffU : 0) | (kept[1] ? 0xffff0000U : 0))); }

    friend floats fma(bf16_lanes a, bf16_lanes b, floats sum) {
#if defined(__AVX512BF16__)
        return floats::batch(_mm512_dpbf16_ps(sum.value, reinterpret_cast<__m512bh>(a.bits), reinterpret_cast<__m512bh>(b.bits)));
#else
        return emulated_fma(a, b, sum);
#endif
    }
    /// fma of pairs of bfloat16 without the instruction for it.
    friend floats emulated_fma(bf16_lanes a, bf16_lanes b, floats sum) {
        return fma(a.first(), b.first(), fma(a.second(), b.second(), sum));
    }

private:
    /// In the upper halves, the nearest bfloat16; of NaN a quiet one. The lower halves hold anything.
    static vector upper_half_rounded(floats numbers) {
        typedef std::int32_t integers __attribute__((vector_size(size * sizeof(std::int32_t))));
        const auto x = std::bit_cast<vector>(numbers);
        const auto magnitude = std::bit_cast<integers>(x & 0x7fffffff);
        const auto subnormal = std::bit_cast<vector>(magnitude < 0x00800000), nan = std::bit_cast<vector>(magnitude > 0x7f800000);
        const vector nearest = (x + 0x7fff + (x >> 16 & 1)) & ~nan, quiet = (x | 0x00400000) & nan;
        return ((nearest | quiet) & ~subnormal) | (x & 0x80000000);
    }
};

template <>
struct operand_traits<bf16_pair> {
    using lanes = bf16_lanes;
};
template <>
inline constexpr index_t terms_of<bf16_pair> = 2;

} // namespace attn::simd

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
