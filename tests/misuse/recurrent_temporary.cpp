// expect: deleted
// Decays that are gone before the operator reads them.
#include <attn/attention/recurrent_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::rule::gated rule{attn::tensor<float>({1, 1, 4, 1})};
#else
    const attn::tensor<float> log_decay({1, 1, 4, 1});
    const attn::rule::gated rule{log_decay};
#endif
    return rule.log_decay.shape().tokens == 4 ? 0 : 1;
}
