// expect: (could not convert|no viable conversion).*tensor_view<const float>
// Decays in float beside betas in double.
#include <attn/attention/recurrent_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = double;
#else
    using number = float;
#endif
    const attn::tensor<float> log_decay({1, 1, 4, 1});
    const attn::tensor<number> beta({1, 1, 4, 1});
    const attn::rule::gated_delta rule{log_decay, beta};
    return rule.beta.shape().tokens == 4 ? 0 : 1;
}
