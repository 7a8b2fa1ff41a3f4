// expect: attn: wanted is gradients of the operator
// The gradients of another operator.
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_backward.hpp>

int main() {
    const auto x = attn::tensor<float>::random({1, 1, 4, 8}, 1);
    attn::tensor<float> out(x.shape()), rows({1, 1, 4, 1}), of_x(x.shape());
    const attn::talking_heads_attention op{};
    const attn::inputs<float> in{x, x, x};
    attn::attend(op, in, {out, rows});
#ifdef ATTN_MISUSE
    attn::gradients_of<attn::softmax_attention<>, float> wanted;
#else
    attn::gradients_of<attn::talking_heads_attention<>, float> wanted;
#endif
    wanted.queries = of_x;
    attn::backward(op, in, {out, rows}, {x}, wanted);
}
