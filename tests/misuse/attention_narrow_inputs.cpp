// expect: attn: tensors of 16-bit numbers are viewed, read and written as float: inputs<float>
// Inputs of the type that tensors are stored in, not of what is computed in.
#include <Eigen/Core>
#include <attn/attention/softmax_attention.hpp>

int main() {
    const attn::tensor<Eigen::bfloat16> x({1, 1, 4, 8});
#ifdef ATTN_MISUSE
    const attn::inputs<Eigen::bfloat16> in{x, x, x};
#else
    const attn::inputs<float> in{x, x, x};
#endif
    return in.queries.shape().tokens == 4 ? 0 : 1;
}
