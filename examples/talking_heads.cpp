// Talking heads: heads that are mixed before the softmax and after it, and what mixing does to the attention of each.
#include <attn/attention/talking_heads_attention.hpp>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr attn::index_t heads = 4, n = 6, channels = 8;

/// The weights of query 5 in every head: the identity as values shows the attention matrix.
void show(const char* title, const attn::talking_heads_attention<>& op, const attn::tensor<float>& q, const attn::tensor<float>& k) {
    attn::tensor<float> identity({.heads = 1, .tokens = n, .channels = n});
    for (attn::index_t i = 0; i < n; ++i) identity(0, 0, i, i) = 1;
    const auto weights = attn::attend(op, q, k, identity);
    std::printf("%s\n", title);
    for (attn::index_t h = 0; h < weights.shape().heads; ++h) {
        std::printf("  head %td:", h);
        for (attn::index_t j = 0; j < n; ++j) std::printf(" %5.2f", static_cast<double>(weights(0, h, n - 1, j)));
        std::puts("");
    }
}

} // namespace

int main() {
    attn::tensor<float> q({.heads = heads, .tokens = n, .channels = channels}), k(q.shape());
    std::mt19937 random(1);
    for (auto* x : {&q, &k}) std::generate_n(x->data(), x->shape().size(), [&] { return static_cast<float>(random()) / 0x1p30f - 2; });

    // Mixings are matrices (1, 1, heads after, heads before): row-major memory of your own, any strides.
    const std::vector<double> neighbours{1, .5, 0, 0, 0, 1, .5, 0, 0, 0, 1, .5, .5, 0, 0, 1};
    const std::vector<double> average{.5, .5, 0, 0, 0, 0, .5, .5};
    const attn::tensor_view<const double> before = attn::head_major(neighbours.data(), {.tokens = heads, .channels = heads});
    const attn::tensor_view<const double> after = attn::head_major(average.data(), {.tokens = 2, .channels = heads});

    show("heads by themselves", {}, q, k);
    show("each head listens to the scores of the next", {.logits_mix = before}, q, k);
    show("and two heads of weights come of four", {.logits_mix = before, .weights_mix = after}, q, k);

    // Memory never holds heads x n x n numbers: a bounded tile, whatever n is, if you give it no more.
    const attn::talking_heads_attention<> op{.logits_mix = before, .weights_mix = before};
    for (const attn::index_t tokens : {1000, 10000}) {
        const attn::shape s{.heads = heads, .tokens = tokens, .channels = channels};
        const bool small = attn::least_workspace_bytes<float>(op, {s, s, s}) < 1'000'000;
        std::printf("%td tokens: %s of workspace do\n", tokens, small ? "less than a megabyte" : "more than a megabyte");
    }
}
