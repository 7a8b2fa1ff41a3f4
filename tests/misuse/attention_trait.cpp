// expect: has_log_sum_exps
// An operator of one's own, one of whose traits is misspelt.
#include <attn/attention/attention.hpp>

struct nothing_attention {
    static constexpr std::string_view name = "nothing_attention";
#ifdef ATTN_MISUSE
    static constexpr attn::attention_traits traits{.has_log_sum_exps = false};
#else
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false};
#endif
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
    template <attn::Scalar T>
    void forward(const attn::inputs<T>&, const attn::outputs<T>&, const attn::execution&) const {}
};

int main() {
    const attn::tensor<float> x({1, 1, 3, 4});
    return attn::attend(nothing_attention(), x, x, x).shape().tokens == 3 ? 0 : 1;
}
