// Your own score function and your own mask: scores that are capped and decay with distance, documents packed into one sequence, a window.
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/score/composed_score.hpp>

#include <cstdio>

int main() {
    // Both are one generic function of absolute positions, and run on numbers, on registers and on whole ranges alike.
    const auto decay = []<class S>(S score, auto query, auto key) { return score - S(0.2) * S(query - key); };
    const auto same_document = [](auto i, auto j) { return attn::floor_div(i, 8) == attn::floor_div(j, 8); };
    const auto op = attn::softmax_attention{.score = attn::composed_score{attn::soft_cap{30}, decay},
                                            .pattern = attn::causal{} & attn::pattern::local{4} & attn::pattern::predicate{same_document}};

    constexpr attn::index_t n = 16;
    const Eigen::MatrixXf tokens = Eigen::MatrixXf::Zero(n, 4);
    const Eigen::MatrixXf weights = attn::attend(op, tokens, tokens, Eigen::MatrixXf(Eigen::MatrixXf::Identity(n, n)));
    std::puts("percent of its attention that each query (row) gives to each key; two documents of eight tokens, windows of five:");
    for (Eigen::Index i = 0; i < n; ++i) {
        for (Eigen::Index j = 0; j < n; ++j)
            if (weights(i, j) > 0)
                std::printf("%4.0f", static_cast<double>(100 * weights(i, j)));
            else
                std::printf("   .");
        std::puts("");
    }

    // The pattern also decides what is computed: keys that no query of a tile sees are never visited.
    const attn::shape text{.tokens = 4096, .channels = 64};
    const auto pairs = visited_pairs(op, {text, text, text});
    const auto share = [](attn::index_t count) { return 100 * static_cast<double>(count) / (4096.0 * 4096); };
    std::printf("of 4096 tokens, %.2f %% of all pairs are visible; less than 1 %% are computed: %s\n", share(pairs.visible),
                share(pairs.visited) < 1 ? "yes" : "no");
}
