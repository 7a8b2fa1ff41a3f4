// expect: attn: q, k and v must be of double, or each of float or 16-bit numbers
// Keys of 16 bits, which are computed in float, beside queries in double.
#include <Eigen/Core>
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::tensor<double> q({1, 1, 4, 8}), v({1, 1, 4, 8});
#else
    const attn::tensor<float> q({1, 1, 4, 8}), v({1, 1, 4, 8});
#endif
    const attn::tensor<Eigen::bfloat16> k({1, 1, 4, 8});
    return attn::attend(attn::softmax_attention{}, q, k, v).shape().tokens == 4 ? 0 : 1;
}
