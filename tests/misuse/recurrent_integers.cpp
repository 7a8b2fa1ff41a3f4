// expect: (no matching function for call to|no viable constructor or deduction guide).*gated
// Decays that are integers.
#include <attn/attention/recurrent_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = int;
#else
    using number = float;
#endif
    const attn::tensor<number> log_decay({1, 1, 4, 1});
    const attn::tensor<float> x({1, 1, 4, 8});
    return attn::attend(attn::recurrent_attention{.rule = attn::rule::gated{log_decay}}, x, x, x).shape().tokens == 4 ? 0 : 1;
}
