// expect: has_log_sum_exps
// An operator of one's own, one of whose traits is misspelt.
#include "small_operator.hpp"

struct nothing_attention : small_operator {
#ifdef ATTN_MISUSE
    static constexpr attn::attention_traits traits{.has_log_sum_exps = false};
#else
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false};
#endif
    void check_apart(const attn::output_memory&) const {}
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    return attn::attend(nothing_attention{}, x, x, x).shape().tokens == 3 ? 0 : 1;
}
