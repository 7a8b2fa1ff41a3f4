// expect: this operator has no linear_state
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/cache/linear_state.hpp>

attn::linear_state<float> state_of_nothing() {
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.pattern = attn::causal{}};
#else
    const attn::linear_attention op{.pattern = attn::causal{}};
#endif
    return attn::linear_state<float>(op, {.kv_heads = 8, .key_channels = 64, .value_channels = 64});
}
