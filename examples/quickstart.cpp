// Causal attention on Eigen matrices, and a look at its weights.
#include <attn/attn.hpp>

#include <cstdio>

int main() {
    // Five tokens of four channels. Rows are tokens; any storage order, maps and blocks work too.
    Eigen::MatrixXf tokens(5, 4);
    tokens << 1, 0, 0, 0,
              0, 1, 0, 0,
              1, 1, 0, 0,
              0, 0, 1, 0,
              1, 0, 0, 1;

    const auto causal = attn::softmax_attention{.scale = 2.0, .pattern = attn::causal{}};
    const Eigen::MatrixXf out = attn::attend(causal, tokens, tokens, tokens);

    // Attention is a matrix applied to the values, so the identity as values shows the matrix.
    const Eigen::MatrixXf weights = attn::attend(causal, tokens, tokens, Eigen::MatrixXf(Eigen::MatrixXf::Identity(5, 5)));

    std::puts("weights: each query sees itself and the tokens before it");
    for (Eigen::Index i = 0; i < 5; ++i) {
        for (Eigen::Index j = 0; j < 5; ++j) std::printf(" %.3f", static_cast<double>(weights(i, j)));
        std::puts("");
    }
    std::printf("they applied to the tokens are the result: %s\n", out.isApprox(weights * tokens, 1e-5f) ? "yes" : "no");
}
