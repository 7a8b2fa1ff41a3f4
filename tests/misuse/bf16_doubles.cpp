// expect: attn: bf16_products are of tensors of float or of 16-bit numbers
// Tensors of double where products are rounded to 16 bits.
#include <attn/attention/products.hpp>
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<number> x({1, 1, 4, 8});
    return attn::attend(attn::softmax_attention{.products = attn::bf16_products{}}, attn::inputs<number>{x, x, x}).shape().size() == 32 ? 0 : 1;
}
