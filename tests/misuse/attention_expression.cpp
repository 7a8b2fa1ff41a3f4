// expect: attn: q, k and v are matrices of float, double or 16-bit numbers; evaluate an expression first
// An Eigen expression, which has no memory.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>

int main() {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Zero(4, 8);
#ifdef ATTN_MISUSE
    return attn::attend(attn::softmax_attention{}, 2 * x, x, x).rows() == 4 ? 0 : 1;
#else
    return attn::attend(attn::softmax_attention{}, (2 * x).eval(), x, x).rows() == 4 ? 0 : 1;
#endif
}
