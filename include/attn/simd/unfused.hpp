// Products and sums that compilers neither fuse nor take apart, however they are asked (-ffp-contract): so that bits do not depend on it.
#pragma once

#include "lane_mask.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Whether multiply-adds are rounded once.
inline constexpr bool fuses =
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    true;
#else
    false;
#endif

/// True where a register is the compiler's own vector of its numbers: no array that emulates one, and not one of integers, as WebAssembly's
/// all are.
template <class Batch>
inline constexpr bool is_native =
    !std::is_class_v<typename Batch::register_type> &&
    !std::same_as<typename Batch::register_type, typename xsimd::batch<std::int32_t, typename Batch::arch_type>::register_type>;

namespace detail {

/// The compiler's own vector. gcc 12 forgets the attribute of a type that is not named so.
template <class T, int Size>
struct vector_of {
    typedef T type __attribute__((vector_size(Size * sizeof(T))));
};

} // namespace detail

/// A product, a number or a vector of the compiler's, that is rounded by itself: the compiler does not know it for one.
template <class Product>
[[gnu::always_inline]] inline Product unfused(Product product) {
#if defined(__aarch64__)
    asm("" : "+w"(product));
#elif defined(__AVX512F__) || defined(__FMA__)
    asm("" : "+v"(product));
#endif
    return product;
}

/// a b + c, rounded once where the instruction set can.
template <Scalar T>
[[gnu::always_inline]] inline T multiply_add(T a, T b, T c) {
    if constexpr (fuses) return std::fma(a, b, c);
    else return a * b + c; // std::fma would be a function that emulates one
}

} // namespace attn::simd
