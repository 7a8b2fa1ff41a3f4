// expect: attn: tensors of 16-bit numbers are computed with in float, not in double
// alone: gcc forgets where an instantiation began whose templates are precompiled
// A norm that computes in double, of tokens of 16 bits.
#include <Eigen/Core>
#include <attn/norm/layer_norm.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<Eigen::bfloat16> x({1, 1, 4, 8});
    return attn::normalise(attn::layer_norm<number>{}, x).shape().tokens == 4 ? 0 : 1;
}
