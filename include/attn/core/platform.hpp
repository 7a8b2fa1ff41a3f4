// What attn needs of the compiler, its flags and the processor: said here, before anything else of attn's is read.
#pragma once

#if __cplusplus < 202002L
#error "attn needs C++20: compile with -std=c++20 or later"
#elif defined(__apple_build_version__) && __apple_build_version__ < 16000000
#error "attn needs Apple clang 16 or later"
#elif defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 17
#error "attn needs clang 17 or later"
#elif defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "attn needs gcc 12 or later"
#elif !defined(__GNUC__)
#error "attn needs gcc or clang: it uses their vectors"
#endif
#if defined(__wasm__) && !defined(__wasm_simd128__)
#error "attn needs WebAssembly's registers: compile with -msimd128"
#elif defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ < 8 && !defined(__wasm__)
#error "attn needs a 64-bit processor, or WebAssembly"
#endif

#ifdef __FAST_MATH__
#error "attn: -ffast-math removes the rounding and the NaN rules that attention kernels rely on; compile without it (-O3 is enough)"
#elif defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "attn: -ffinite-math-only takes NaN and infinity for impossible, but attention computes with them; compile without it"
#endif
