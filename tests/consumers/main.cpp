// What a user's first program with attn may look like.
#include <attn/attn.hpp>

int main() {
    const Eigen::MatrixXf q = Eigen::MatrixXf::Random(10, 4), k = Eigen::MatrixXf::Random(10, 4), v = Eigen::MatrixXf::Ones(10, 3);
    const auto out = attn::attend(attn::softmax_attention{.pattern = attn::causal{} & attn::pattern::local{3}}, q, k, v);
    return out.isOnes(1e-5f) ? 0 : 1; // averages of ones
}
