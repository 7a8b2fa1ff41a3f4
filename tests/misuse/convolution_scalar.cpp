// expect: attn: convolution, encoding and scale have the scalar type of the tokens
// Convolution weights in float for tokens in double.
#include <attn/attention/simplified_linear_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::tensor<float> kernel({1, 8, 1, 3});
    const attn::simplified_linear_attention op{.convolution = attn::depthwise_convolution{.weights = kernel}};
#else
    const attn::tensor<double> kernel({1, 8, 1, 3});
    const attn::simplified_linear_attention<attn::dense, double> op{.convolution = attn::depthwise_convolution{.weights = kernel}};
#endif
    const attn::tensor<double> x({1, 1, 4, 8});
    return attn::attend(op, x, x, x).shape().tokens == 4 ? 0 : 1;
}
