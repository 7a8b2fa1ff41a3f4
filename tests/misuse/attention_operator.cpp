// expect: no matching function for call to .*attend.*Attention
// A pattern where an operator is expected.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>

int main() {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Zero(4, 8);
#ifdef ATTN_MISUSE
    return attn::attend(attn::causal{}, x, x, x).rows() == 4 ? 0 : 1;
#else
    return attn::attend(attn::softmax_attention{.pattern = attn::causal{}}, x, x, x).rows() == 4 ? 0 : 1;
#endif
}
