// expect: deleted
// Rotations that are gone before the operator reads them.
#include <attn/attention/lsh_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::lsh_attention op{.rotations = attn::tensor<float>({2, 1, 8, 4})};
#else
    const attn::tensor<float> rotations({2, 1, 8, 4});
    const attn::lsh_attention op{.rotations = rotations};
#endif
    return op.rotations.shape().batch == 2 ? 0 : 1;
}
