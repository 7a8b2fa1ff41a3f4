// expect: attn: q, k and v are matrices of float, double or 16-bit numbers; evaluate an expression first
// The gradient of a call on an Eigen expression, which has no memory.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>

int main() {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Zero(4, 8);
    const Eigen::VectorXf log_sum_exp = Eigen::VectorXf::Zero(4);
    Eigen::MatrixXf dq(4, 8);
#ifdef ATTN_MISUSE
    const auto q = 2 * x;
#else
    const auto q = (2 * x).eval();
#endif
    attn::backward(attn::softmax_attention{}, q, x, x, {attn::view(x), attn::view(log_sum_exp)}, {attn::view(x)}, {{attn::view(dq)}});
}
