// expect: attn: a score function takes numbers of any type
// A score function of floats, which registers of them are not.
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.score = [](float score, long, long) { return score; }};
#else
    const attn::softmax_attention op{.score = [](auto score, auto, auto) { return score; }};
#endif
    const attn::tensor<float> x({1, 1, 4, 8});
    return attn::attend(op, x, x, x).shape().tokens == 4 ? 0 : 1;
}
