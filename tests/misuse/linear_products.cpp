// expect: attn: bf16_products are of tensors of float or of 16-bit numbers, not of double
// A linear of double whose products are rounded to 16 bits.
#include <attn/layer/linear.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<number> weight({1, 1, 4, 8}), x({1, 1, 3, 8});
    return attn::forward(attn::linear{.weight = weight, .products = attn::bf16_products{}}, {.tokens = x}).shape().channels == 4 ? 0 : 1;
}
