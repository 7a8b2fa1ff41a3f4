// The inline namespace that all of attn's code lives in: it is named after the instruction set that a translation unit is compiled for.
#pragma once

#include "platform.hpp"

// A program may link objects that were compiled for different instruction sets, and of an inline function that both hold the linker keeps
// either one. The name tells the functions apart, `attn::avx512::overlap` and `attn::sse2::overlap`: no object ever runs another's code. So
// types differ too, and what such objects hand to each other are plain pointers and numbers.
#if defined(ATTN_NO_PREFETCH) // a benchmark's file, whose kernels are others
#define ATTN_PROCESSOR without_prefetch
#elif defined(__AVX512FP16__)
#define ATTN_PROCESSOR avx512_fp16
#elif defined(__AVX512BF16__)
#define ATTN_PROCESSOR avx512_bf16
#elif defined(__AVX512VBMI2__)
#define ATTN_PROCESSOR avx512_vbmi2
#elif defined(__AVX512VNNI__)
#define ATTN_PROCESSOR avx512_vnni
#elif defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ATTN_PROCESSOR avx512
#elif defined(__AVX512F__)
#define ATTN_PROCESSOR avx512f
#elif defined(__AVXVNNI__)
#define ATTN_PROCESSOR avx_vnni
#elif defined(__AVX2__) && defined(__FMA__)
#define ATTN_PROCESSOR avx2_fma
#elif defined(__AVX2__)
#define ATTN_PROCESSOR avx2
#elif defined(__AVX__) && defined(__FMA__)
#define ATTN_PROCESSOR avx_fma
#elif defined(__AVX__)
#define ATTN_PROCESSOR avx
#elif defined(__SSE4_2__)
#define ATTN_PROCESSOR sse4_2
#elif defined(__SSE4_1__)
#define ATTN_PROCESSOR sse4_1
#elif defined(__SSSE3__)
#define ATTN_PROCESSOR ssse3
#elif defined(__SSE3__)
#define ATTN_PROCESSOR sse3
#elif defined(__SSE2__)
#define ATTN_PROCESSOR sse2
#elif defined(__ARM_FEATURE_SVE)
#define ATTN_PROCESSOR sve
#elif defined(__ARM_NEON)
#define ATTN_PROCESSOR neon
#elif defined(__wasm_simd128__)
#define ATTN_PROCESSOR wasm
#else
#define ATTN_PROCESSOR baseline
#endif
#ifdef __cpp_exceptions
#define ATTN_INSTRUCTION_SET ATTN_PROCESSOR
#else // what throws in other objects ends the program here
#define ATTN_INSTRUCTION_SET ATTN_PROCESSOR::inline without_exceptions
#endif
