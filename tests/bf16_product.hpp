// A product of matrices of floats that are rounded to bfloat16, by the micro-kernel: compiled for two instruction sets.
#pragma once

#include <attn/kernel/bf16_rows.hpp>
#include <attn/kernel/gemm/matrix_tile.hpp>
#include <attn/kernel/prefetch.hpp>

#include <vector>

namespace attn::testing {

/// The same on AVX2: bf16_emulated.cpp.
void emulated_bf16_product(const float* a, const float* b, long rows, long depth, long columns, float* product);

namespace {

/// product (rows, columns) = a (rows, depth) b (depth, columns), which are contiguous.
[[maybe_unused]] void bf16_product(const float* a, const float* b, index_t rows, index_t depth, index_t columns, float* product) {
    const auto pairs = kernel::channel_pairs::width(depth);
    std::vector<simd::bf16_pair> left(static_cast<std::size_t>(rows * pairs)), right(static_cast<std::size_t>((depth + 1) / 2 * columns));
    kernel::channel_pairs::copy(row_block<const float>{a, depth, 1}, rows, 0, depth, left.data(), pairs);
    kernel::row_pairs::copy(row_block<const float>{b, columns, 1}, depth, 0, columns, right.data(), columns);
    kernel::no_prefetch nothing;
    kernel::multiply_wide<float, simd::bf16_pair>(rows, columns / simd::lanes<float>::size,
                                                  {.a = {left.data(), pairs, 1}, .b = {right.data(), columns, 1},
                                                   .depth = (depth + 1) / 2, .c = {product, columns, 1}},
                                                  nothing);
}

} // namespace

} // namespace attn::testing
