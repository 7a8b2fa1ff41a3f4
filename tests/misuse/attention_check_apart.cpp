// expect: op.check_apart\(memory\)
// An operator of one's own that refers to memory, and misspells the member by which outputs are kept apart from it.
#include "small_operator.hpp"

struct biased_attention : small_operator {
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false};

    attn::borrowed<const float> bias = {};

#ifdef ATTN_MISUSE
    void check_appart(const attn::output_memory& out) const { out.require_apart("bias", bias); }
#else
    void check_apart(const attn::output_memory& out) const { out.require_apart("bias", bias); }
#endif
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    return attn::attend(biased_attention{}, x, x, x).shape().tokens == 3 ? 0 : 1;
}
