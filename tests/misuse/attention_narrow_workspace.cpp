// expect: narrow_workspace_bytes|has_narrow_workspace
// An operator of one's own that names memory for results of 16 bits among its traits, and misspells the member.
#include "small_operator.hpp"

struct narrow_attention : small_operator {
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false, .has_narrow_workspace = true};

    void check_apart(const attn::output_memory&) const {}
    template <attn::Scalar>
#ifdef ATTN_MISUSE
    std::size_t narow_workspace_bytes(const attn::input_shapes&, attn::index_t) const {
#else
    std::size_t narrow_workspace_bytes(const attn::input_shapes&, attn::index_t) const {
#endif
        return 0;
    }
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    return attn::attend(narrow_attention{}, x, x, x).shape().tokens == 3 ? 0 : 1;
}
