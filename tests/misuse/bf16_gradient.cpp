// expect: constraints not satisfied
// The gradient of an operator whose products are rounded.
#include <attn/attention/products.hpp>
#include <attn/attention/softmax_backward.hpp>

int main() {
    attn::tensor<float> x({1, 1, 4, 8}), out(x.shape()), rows({1, 1, 4, 1}), of_x(x.shape());
    const attn::inputs<float> in{x, x, x};
    const attn::softmax_attention rounds{.products = attn::bf16_products{}};
    attn::attend(rounds, in, attn::outputs<float>{out, rows});
#ifdef ATTN_MISUSE
    attn::backward(rounds, in, {out, rows}, {x}, {{of_x}});
#else
    attn::backward(attn::softmax_attention{}, in, {out, rows}, {x}, {{of_x}});
#endif
}
