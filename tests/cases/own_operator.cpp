// The example of an operator of one's own, a discounted mean, registered as the library's are: cmake/run bench discounted_mean
#define main main_of_own_operator // the example is a program
#include "../../examples/own_operator.cpp"
#undef main

#include "case.hpp"

namespace my {

/// What the tests are told: how to call it, and its definition.
template <attn::Scalar T>
struct discounted_mean_instance final : attn::testing::instance<T> {
    discounted_mean op;

    /// The printed formula: a sum of powers for each number.
    template <attn::Scalar S>
    void define(const attn::inputs<S>& in, const attn::outputs<S>& out) const {
        const auto [batch, heads, n, d_v] = out.values.shape();
        const auto kv_heads = in.values.shape().heads, m = in.values.shape().tokens;
        for (attn::index_t b = 0; b < batch; ++b)
            for (attn::index_t h = 0; h < heads; ++h)
                for (attn::index_t c = 0; c < d_v; ++c) {
                    S sum = 0, all = 0;
                    for (attn::index_t j = 0; j < m; ++j) {
                        const S weight = std::pow(static_cast<S>(op.discount), static_cast<S>(m - 1 - j));
                        sum += weight * in.values(b, h / (heads / kv_heads), j, c);
                        all += weight;
                    }
                    for (attn::index_t i = 0; i < n; ++i) out.values(b, h, i, c) = m == 0 ? S(0) : sum / all;
                }
    }
    void attend(const attn::inputs<T>& in, const attn::outputs<T>& out, const attn::execution& run) const override {
        attn::attend(op, in, out, run);
    }
    std::size_t workspace_bytes(const attn::input_shapes& s, attn::index_t concurrency) const override {
        return op.workspace_bytes<T>(s, concurrency);
    }
    attn::shape output_shape(const attn::input_shapes& s) const override { return op.output_shape(s); }
    void reference(const attn::inputs<double>& in, const attn::outputs<double>& out) const override { define<double>(in, out); }
    void plain(const attn::inputs<T>& in, const attn::outputs<T>& out) const override { define<T>(in, out); }
    void naive(const attn::testing::naive_forms<T>&, const attn::inputs<T>& in, const attn::outputs<T>& out) const override { define<T>(in, out); }
    double useful_flops(const attn::testing::problem& p) const override {
        return 2.0 * static_cast<double>(p.batch * p.heads * p.keys) * static_cast<double>(p.value_dim);
    }
};

const attn::testing::registered discounted_mean_case(
    {.name = "discounted_mean", .cost = "2 m d_v", .has_log_sum_exp = false, .supports = [](const auto&) { return true; }},
    []<class T>(const auto&, T) -> std::unique_ptr<attn::testing::instance<T>> { return std::make_unique<discounted_mean_instance<T>>(); });

} // namespace my
