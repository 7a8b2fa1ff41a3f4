// expect: attn: a score function makes a number of a score and two positions
// A score function without the key.
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.score = [](auto score, auto) { return score; }};
#else
    const attn::softmax_attention op{.score = [](auto score, auto, auto) { return score; }};
#endif
    return op.sinks.empty() ? 0 : 1;
}
