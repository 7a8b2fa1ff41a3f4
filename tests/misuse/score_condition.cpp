// expect: could not convert|not contextually convertible
// A score function with an if: lanes have none.
#include <attn/attention/softmax_attention.hpp>

int main() {
    const attn::tensor<float> x({1, 1, 4, 8});
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.score = [](auto score, auto, auto) { return score > 0 ? score : -score; }};
#else
    const attn::softmax_attention op{.score = [](auto score, auto, auto) {
        using attn::select;
        return select(score > 0, score, -score);
    }};
#endif
    return attn::attend(op, x, x, x).shape().tokens == 4 ? 0 : 1;
}
