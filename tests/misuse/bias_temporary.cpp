// expect: deleted
// A bias that is gone before the operator reads it.
#include <attn/score/additive_bias.hpp>

int main() {
    const attn::tensor<float> table({1, 1, 9, 3});
#ifdef ATTN_MISUSE
    const attn::additive_bias score{attn::window_bias(table, 2, 2)};
#else
    const auto bias = attn::window_bias(table, 2, 2);
    const attn::additive_bias score{bias};
#endif
    return score.bias.shape().heads == 3 ? 0 : 1;
}
