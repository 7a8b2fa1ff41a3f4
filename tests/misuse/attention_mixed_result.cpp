// expect: attn: q, k, v and out must be of double, or each of float or 16-bit numbers
// A result in double of tensors of 16 bits, which are computed in float.
#include <Eigen/Core>
#include <attn/attention/softmax_attention.hpp>

int main() {
    const attn::tensor<Eigen::half> x({1, 1, 4, 8});
#ifdef ATTN_MISUSE
    attn::tensor<double> out(x.shape());
#else
    attn::tensor<Eigen::bfloat16> out(x.shape());
#endif
    attn::attend(attn::softmax_attention{}, x, x, x, out);
}
