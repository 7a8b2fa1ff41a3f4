// expect: deleted
// A kernel that is gone before the convolution reads it.
#include <attn/attention/depthwise_convolution.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::depthwise_convolution convolution{.weights = attn::tensor<float>({1, 4, 3, 3})};
#else
    const attn::tensor<float> weights({1, 4, 3, 3});
    const attn::depthwise_convolution convolution{.weights = weights};
#endif
    return convolution.present() ? 0 : 1;
}
