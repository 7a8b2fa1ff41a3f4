// expect: attn: tensors of 16-bit numbers are computed with in float, not in double
// A weight of 16-bit numbers, which is computed with in float, in a linear of double.
#include <attn/layer/linear.hpp>

#include <Eigen/Core>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<Eigen::bfloat16> weight({1, 1, 4, 8});
    const attn::tensor<number> x({1, 1, 3, 8});
    return attn::forward(attn::linear<number>{.weight = weight}, {.tokens = x}).shape().channels == 4 ? 0 : 1;
}
