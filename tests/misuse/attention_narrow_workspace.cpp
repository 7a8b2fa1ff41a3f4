// expect: narrow_workspace_bytes|has_narrow_workspace
// An operator of one's own that names memory for results of 16 bits among its traits, and misspells the member.
#include <attn/attention/attention.hpp>

struct narrow_attention {
    static constexpr std::string_view name = "narrow_attention";
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false, .has_narrow_workspace = true};

    template <attn::Scalar T>
    void check(const attn::inputs<T>& in) const {
        attn::check_inputs(name, in);
    }
    void check_apart(const attn::output_memory&) const {}
    attn::shape output_shape(const attn::input_shapes& s) const { return s.values; }
    template <attn::Scalar>
    std::size_t workspace_bytes(const attn::input_shapes&, attn::index_t) const {
        return 0;
    }
    template <attn::Scalar>
#ifdef ATTN_MISUSE
    std::size_t narow_workspace_bytes(const attn::input_shapes&, attn::index_t) const {
#else
    std::size_t narrow_workspace_bytes(const attn::input_shapes&, attn::index_t) const {
#endif
        return 0;
    }
    template <attn::Scalar T>
    void forward(const attn::inputs<T>&, const attn::outputs<T>&, const attn::execution&) const {}
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    return attn::attend(narrow_attention(), x, x, x).shape().tokens == 3 ? 0 : 1;
}
