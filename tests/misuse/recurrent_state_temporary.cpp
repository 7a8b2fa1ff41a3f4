// expect: deleted
// A first state that is gone before the operator reads it.
#include <attn/attention/recurrent_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::recurrent_attention op{.rule = attn::rule::linear<>{}, .first_state = attn::tensor<float>({1, 1, 4, 5})};
#else
    const attn::tensor<float> first({1, 1, 4, 5});
    const attn::recurrent_attention op{.rule = attn::rule::linear<>{}, .first_state = first};
#endif
    return op.first_state.shape().tokens == 4 ? 0 : 1;
}
