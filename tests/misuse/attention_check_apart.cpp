// expect: op.check_apart\(memory\)
// An operator of one's own that refers to memory, and misspells the member by which outputs are kept apart from it.
#include <attn/attention/attention.hpp>

struct biased_attention {
    static constexpr std::string_view name = "biased_attention";
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false};

    attn::borrowed<const float> bias;

    template <attn::Scalar T>
    void check(const attn::inputs<T>& in) const {
        attn::check_inputs(name, in);
    }
#ifdef ATTN_MISUSE
    void check_appart(const attn::output_memory& out) const { out.require_apart("bias", bias); }
#else
    void check_apart(const attn::output_memory& out) const { out.require_apart("bias", bias); }
#endif
    attn::shape output_shape(const attn::input_shapes& s) const { return s.values; }
    template <attn::Scalar>
    std::size_t workspace_bytes(const attn::input_shapes&, attn::index_t) const {
        return 0;
    }
    template <attn::Scalar T>
    void forward(const attn::inputs<T>&, const attn::outputs<T>&, const attn::execution&) const {}
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    const biased_attention op{{}};
    return attn::attend(op, x, x, x).shape().tokens == 3 ? 0 : 1;
}
