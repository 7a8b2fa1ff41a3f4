// A long document: Sparse Transformer against dense attention, 16384 tokens each. Times go to the standard error stream.
//     example_long_document [TOKENS]
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace {

template <class Op>
attn::tensor<float> timed(const char* name, const Op& op, const attn::inputs<float>& in, attn::thread_pool& threads) {
    const auto shapes = shapes_of(in);
    const auto all = static_cast<double>(shapes.queries.tokens) * static_cast<double>(shapes.keys.tokens);
    const auto pairs = visited_pairs(op, shapes);
    const auto began = std::chrono::steady_clock::now();
    auto out = attn::attend(op, in, threads);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    std::printf("%-20s %6.2f %% of all pairs\n", name, 100 * static_cast<double>(pairs.visible) / all);
    std::fprintf(stderr, "%-20s %6.3f s, %.1f MB of workspace (a matrix of scores: %.0f MB)\n", name, seconds.count(),
                 static_cast<double>(attn::workspace_bytes<float>(op, shapes, threads)) / 1e6, all * sizeof(float) / 1e6);
    return out;
}

} // namespace

int main(int count, char** arguments) {
    const attn::index_t n = count > 1 ? std::atol(arguments[1]) : 16384;
    if (n < 1) return std::puts("usage: example_long_document [TOKENS]"), 1;
    const auto stride = static_cast<attn::index_t>(std::lround(std::sqrt(static_cast<double>(n))));
    const auto x = attn::tensor<float>::random({.tokens = n, .channels = 64}, 1);
    const attn::inputs<float> in{x, x, x};
    attn::thread_pool threads;

    std::printf("%td tokens, stride %td\n", n, stride);
    const auto dense = timed("causal", attn::softmax_attention{.pattern = attn::causal{}}, in, threads);
    // The last `stride` tokens, and before them every stride-th: any token reaches any earlier one in two layers.
    const auto sparse =
        timed("Sparse Transformer", attn::softmax_attention{.pattern = attn::sparse_transformer_strided(stride)}, in, threads);

    // Up to `stride` tokens both see the same.
    const auto same = std::min(n, stride) * 64;
    const bool agree =
        std::equal(dense.data(), dense.data() + same, sparse.data(), [](float a, float b) { return std::abs(a - b) < 1e-5f; });
    std::printf("the first %td tokens, which see the same keys either way, come out the same: %s\n", std::min(n, stride),
                agree ? "yes" : "no");
}
