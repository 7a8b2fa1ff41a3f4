// expect: this operator has no recurrent_state
// A layer of softmax attention with a state.
#include <attn/attention/softmax_attention.hpp>
#include <attn/layer/cached.hpp>

attn::tensor<float> next_tokens(const attn::linear<float>& projection, const attn::tensor<float>& x, attn::recurrent_state<float>& state) {
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.pattern = attn::causal{}};
#else
    const attn::recurrent_attention op{.rule = attn::rule::linear<float>{}};
#endif
    const attn::multi_head layer{.heads = 4, .q = projection, .k = projection, .v = projection, .out = projection, .attention = op};
    return attn::forward(layer, state, {.tokens = x});
}
