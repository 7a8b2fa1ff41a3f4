// A SIMD register as a value: the one seam between attn and xsimd (8.1 to the newest).
#pragma once

#include "unfused.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Registers of the instruction set: 32 from AVX-512 on (and on AArch64), 16 before.
inline constexpr int register_count =
#if defined(__AVX512F__) || defined(__aarch64__)
    32;
#else
    16;
#endif

/// Asks for the cache line at an address that may be read soon; any address is fine.
[[gnu::always_inline]] inline void prefetch(const void* address) {
    __builtin_prefetch(address);
    asm volatile(""); // gcc 12 takes a function that only prefetches for one without effect, and drops the calls of it
}

/// Asks for the cache line at an address that may be read soon, but into the second-level cache.
[[gnu::always_inline]] inline void prefetch_far(const void* address) {
    __builtin_prefetch(address, 0, 2);
    asm volatile("");
}

/// Asks for the cache line at an address that may be written soon: stores wait for theirs in a short queue.
[[gnu::always_inline]] inline void prefetch_to_write(void* address) {
    __builtin_prefetch(address, 1);
    asm volatile("");
}

/// Ends a series of `lanes::store_streaming`.
inline void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#if defined(__aarch64__)
using neon_floats = xsimd::batch<float, xsimd::neon64>;
#endif

/// Adds the upper half of a vector of the compiler's to the lower, and so on; the last two numbers where they are, in 16 bytes.
template <class T, class Vector, std::size_t... half>
[[gnu::always_inline]] inline T sum_of_halves(Vector v, std::index_sequence<half...>) {
    constexpr auto count = sizeof...(half);
    if constexpr (count == 1) {
        return v[0] + v[1];
    } else if constexpr (sizeof(Vector) == 16) {
        return sum_of_halves<T>(v + __builtin_shufflevector(v, v, (half + count)..., half...), std::make_index_sequence<count / 2>());
    } else {
        const auto low = __builtin_shufflevector(v, v, half...), high = __builtin_shufflevector(v, v, (half + count)...);
        return sum_of_halves<T>(low + high, std::make_index_sequence<count / 2>());
    }
}

/// A register of T. Numbers convert to it by broadcast, so score functions written for doubles run on it unchanged.
template <Scalar T>
struct lanes {
    using batch = xsimd::batch<T>;
    using mask = lane_mask<T>;
    static constexpr int size = static_cast<int>(batch::size);

    batch value;

    lanes() = default;
    lanes(batch v) : value(v) {}
    template <class U>
        requires std::is_arithmetic_v<U>
    lanes(U number) : value(static_cast<T>(number)) {}

    static lanes load(const T* from) { return batch::load_unaligned(from); }
    void store(T* to) const { value.store_unaligned(to); }
    /// Stores to memory past the caches, where the instruction set can: for more than they hold. `to` is aligned to the register; other
    /// threads see it after `finish_streaming`.
    void store_streaming(T* to) const {
#if defined(__SSE2__)
        if constexpr (sizeof(batch) == 16 && sizeof(T) == 4) return _mm_stream_ps(to, value);
        if constexpr (sizeof(batch) == 16 && sizeof(T) == 8) return _mm_stream_pd(to, value);
#endif
#if defined(__AVX__)
        if constexpr (sizeof(batch) == 32 && sizeof(T) == 4) return _mm256_stream_ps(to, value);
        if constexpr (sizeof(batch) == 32 && sizeof(T) == 8) return _mm256_stream_pd(to, value);
#endif
#if defined(__AVX512F__)
        if constexpr (sizeof(batch) == 64 && sizeof(T) == 4) return _mm512_stream_ps(to, value);
        if constexpr (sizeof(batch) == 64 && sizeof(T) == 8) return _mm512_stream_pd(to, value);
#endif
        store(to);
    }
    /// The first `count` lanes, 0 in the others; reads and writes no further.
    static lanes load_first(const T* from, index_t count) {
#if defined(__AVX512F__)
        const auto first = lane_bits::first(count).value;
        if constexpr (sizeof(T) == 4) return batch(_mm512_maskz_loadu_ps(static_cast<__mmask16>(first), from));
        else return batch(_mm512_maskz_loadu_pd(static_cast<__mmask8>(first), from));
#else
        std::array<T, static_cast<std::size_t>(size)> present{};
        for (std::size_t l = 0; l < present.size() && static_cast<index_t>(l) < count; ++l) present[l] = from[l];
        return load(present.data());
#endif
    }
    void store_first(T* to, index_t count) const {
#if defined(__AVX512F__)
        const auto first = lane_bits::first(count).value;
        if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, static_cast<__mmask16>(first), value);
        else _mm512_mask_storeu_pd(to, static_cast<__mmask8>(first), value);
#else
        std::array<T, static_cast<std::size_t>(size)> present;
        store(present.data());
        for (std::size_t l = 0; l < present.size() && static_cast<index_t>(l) < count; ++l) to[l] = present[l];
#endif
    }

    friend lanes operator+(lanes a, lanes b) { return a.value + b.value; }
    friend lanes operator-(lanes a, lanes b) { return a.value - b.value; }
    /// Rounded by itself: compilers would fuse it with a sum that it goes into (-ffp-contract=fast), or not; fma says where.
    friend lanes operator*(lanes a, lanes b) {
        const batch product = a.value * b.value;
        if constexpr (is_native<batch>) return batch(unfused(static_cast<typename batch::register_type>(product)));
        else return product;
    }
    friend lanes operator/(lanes a, lanes b) {
#if defined(__aarch64__)
        if constexpr (std::same_as<batch, neon_floats>) return batch(vdivq_f32(a.value, b.value)); // xsimd estimates it
#endif
        return a.value / b.value;
    }
    friend lanes operator-(lanes a) {
        if constexpr (is_native<batch>) return batch(-static_cast<typename batch::register_type>(a.value)); // in xsimd 8.1, 0 of 0
        else return -a.value;
    }
    lanes& operator+=(lanes b) { return *this = *this + b; }
    lanes& operator-=(lanes b) { return *this = *this - b; }
    lanes& operator*=(lanes b) { return *this = *this * b; }
    lanes& operator/=(lanes b) { return *this = *this / b; }
    friend mask operator<(lanes a, lanes b) { return {a.value < b.value}; }
    friend mask operator>(lanes a, lanes b) { return {a.value > b.value}; }
    friend mask operator<=(lanes a, lanes b) { return {a.value <= b.value}; }
    friend mask operator>=(lanes a, lanes b) { return {a.value >= b.value}; }
    friend mask operator==(lanes a, lanes b) { return {a.value == b.value}; }
    friend mask operator!=(lanes a, lanes b) { return !(a == b); } // xsimd 8.1 says no for NaN on AVX-512

    /// a * b + c, rounded once where the instruction set can.
    friend lanes fma(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
        // xsimd 8.1 writes x * y + z here, which clang does not contract.
        if constexpr (sizeof(T) == 4) return batch(_mm512_fmadd_ps(a.value, b.value, c.value));
        else return batch(_mm512_fmadd_pd(a.value, b.value, c.value));
#else
        return xsimd::fma(a.value, b.value, c.value);
#endif
    }
    /// The larger; the second where either is NaN.
    friend lanes max_or_second(lanes a, lanes b) { return extreme_or_second<true>(a, b); }
    /// The smaller; the second where either is NaN.
    friend lanes min_or_second(lanes a, lanes b) { return extreme_or_second<false>(a, b); }
    friend lanes select(mask condition, lanes yes, lanes no) { return xsimd::select(condition.value, yes.value, no.value); }
    friend lanes select(lane_bits condition, lanes yes, lanes no) { return select(mask::from_bits(condition), yes, no); }
    friend lanes min(lanes a, lanes b) { return xsimd::min(a.value, b.value); }
    friend lanes max(lanes a, lanes b) { return xsimd::max(a.value, b.value); }
    friend lanes abs(lanes a) { return xsimd::abs(a.value); }
    /// The sum over the lanes: halves are added until one number is left.
    friend T sum(lanes a) {
        constexpr std::make_index_sequence<static_cast<std::size_t>(size / 2)> half;
        if constexpr (is_native<batch>) return sum_of_halves<T>(static_cast<typename batch::register_type>(a.value), half);
        else return sum_of_halves<T>(std::bit_cast<typename detail::vector_of<T, size>::type>(a.value), half);
    }
    friend lanes sqrt(lanes a) {
#if defined(__aarch64__)
        if constexpr (std::same_as<batch, neon_floats>) return batch(vsqrtq_f32(a.value)); // likewise
#endif
        return xsimd::sqrt(a.value);
    }

private:
    /// The rule of x86's instructions, which xsimd's max and min give in one order of operands up to 13 and in the other from 14 on.
    template <bool largest>
    static lanes extreme_or_second(lanes a, lanes b) {
#if defined(__AVX512F__)
        if constexpr (sizeof(batch) == 64 && sizeof(T) == 4)
            return batch(largest ? _mm512_max_ps(a.value, b.value) : _mm512_min_ps(a.value, b.value));
        if constexpr (sizeof(batch) == 64 && sizeof(T) == 8)
            return batch(largest ? _mm512_max_pd(a.value, b.value) : _mm512_min_pd(a.value, b.value));
#endif
#if defined(__AVX__)
        if constexpr (sizeof(batch) == 32 && sizeof(T) == 4)
            return batch(largest ? _mm256_max_ps(a.value, b.value) : _mm256_min_ps(a.value, b.value));
        if constexpr (sizeof(batch) == 32 && sizeof(T) == 8)
            return batch(largest ? _mm256_max_pd(a.value, b.value) : _mm256_min_pd(a.value, b.value));
#endif
#if defined(__SSE2__)
        if constexpr (sizeof(batch) == 16 && sizeof(T) == 4)
            return batch(largest ? _mm_max_ps(a.value, b.value) : _mm_min_ps(a.value, b.value));
        if constexpr (sizeof(batch) == 16 && sizeof(T) == 8)
            return batch(largest ? _mm_max_pd(a.value, b.value) : _mm_min_pd(a.value, b.value));
#endif
        return select(largest ? a > b : a < b, a, b);
    }
};

/// What a multiply-add takes: numbers, or what holds several of them. Its register has as many operands as a register of sums has numbers.
template <class E>
struct operand_traits {
    using lanes = simd::lanes<E>;
};
template <class E>
using operand_lanes = typename operand_traits<E>::lanes;
/// Products that one operand adds to a sum.
template <class E>
inline constexpr index_t terms_of = 1;

/// Calls f(c, load, store) for the registers of a row, the last of which may be a part: load(from), store(lanes, to).
template <Scalar T, class F>
[[gnu::always_inline]] inline void for_each_register(index_t channels, const F& f) {
    using registers = lanes<T>;
    index_t c = 0;
    for (; c + registers::size <= channels; c += registers::size)
        f(c, [](const T* from) { return registers::load(from); }, [](registers value, T* to) { value.store(to); });
    if (const auto left = channels - c; left > 0)
        f(
            c, [left](const T* from) { return registers::load_first(from, left); },
            [left](registers value, T* to) { value.store_first(to, left); });
}

} // namespace attn::simd

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The instruction set that the kernels of this translation unit are compiled for, as xsimd calls it: "avx512bw", "fma3+avx2", "sse2".
constexpr const char* instruction_set() { return xsimd::default_arch::name(); }

} // namespace attn

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
