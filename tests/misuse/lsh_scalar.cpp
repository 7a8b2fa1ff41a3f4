// expect: attn: rotations must have the tokens' scalar type, of 16-bit ones float
// Rotations in double for tokens of 16 bits, which are computed in float.
#include <Eigen/Core>
#include <attn/attention/lsh_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::tensor<double> rotations({1, 1, 8, 2});
#else
    const attn::tensor<float> rotations({1, 1, 8, 2});
#endif
    const attn::tensor<Eigen::bfloat16> x({1, 1, 4, 8});
    return attn::attend(attn::lsh_attention{.rotations = rotations}, x, x, x).shape().tokens == 4 ? 0 : 1;
}
