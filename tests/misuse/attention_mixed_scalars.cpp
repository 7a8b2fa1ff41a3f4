// expect: attn: q, k and v must be of double, or each of float or 16-bit numbers
// Keys in double beside queries in float.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>

int main() {
    const Eigen::MatrixXf q = Eigen::MatrixXf::Zero(4, 8), v = q;
#ifdef ATTN_MISUSE
    const Eigen::MatrixXd k = Eigen::MatrixXd::Zero(4, 8);
#else
    const Eigen::MatrixXf k = q;
#endif
    return attn::attend(attn::softmax_attention{}, q, k, v).rows() == 4 ? 0 : 1;
}
