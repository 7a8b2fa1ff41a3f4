// bf16_product for AVX2, which has no instruction for it, in a program for AVX-512.
#include "bf16_product.hpp"

namespace attn::testing {

void emulated_bf16_product(const float* a, const float* b, long rows, long depth, long columns, float* product) {
    bf16_product(a, b, rows, depth, columns, product);
}

} // namespace attn::testing
