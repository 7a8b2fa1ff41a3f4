// expect: attn: q, k and v are matrices of float, double or 16-bit numbers
// Matrices of int.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>

#ifdef ATTN_MISUSE
using matrix = Eigen::MatrixXi;
#else
using matrix = Eigen::MatrixXf;
#endif

int main() {
    const matrix x = matrix::Zero(4, 8);
    return attn::attend(attn::softmax_attention{}, x, x, x).rows() == 4 ? 0 : 1;
}
