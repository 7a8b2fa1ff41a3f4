// expect: attn: an additive_bias has the scalar type of the tokens
// alone: gcc forgets where an instantiation began whose templates are precompiled
// A bias in float for tokens in double.
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::tensor<float> bias({1, 1, 4, 4});
#else
    const attn::tensor<double> bias({1, 1, 4, 4});
#endif
    const attn::tensor<double> x({1, 1, 4, 8});
    return attn::attend(attn::softmax_attention{.score = attn::additive_bias{bias}}, x, x, x).shape().tokens == 4 ? 0 : 1;
}
