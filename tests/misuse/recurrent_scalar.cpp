// expect: attn: decays, betas and states have the scalar type of the tokens
// Decays in double of tokens in float.
#include <attn/attention/recurrent_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<number> log_decay({1, 1, 4, 1});
    const attn::tensor<float> x({1, 1, 4, 8});
    return attn::attend(attn::recurrent_attention{.rule = attn::rule::gated{log_decay}}, x, x, x).shape().tokens == 4 ? 0 : 1;
}
