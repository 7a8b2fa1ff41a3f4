// The example of an operator of one's own, sigmoid attention, registered as the library's are: cmake/run bench sigmoid
#define main main_of_own_operator // the example is a program
#include "../../examples/own_operator.cpp"
#undef main

#include "case.hpp"

namespace my {

/// What the tests are told: how to call it, and its definition. Here both are one text; the definition of a fast kernel is written apart.
template <attn::Scalar T>
struct sigmoid_instance final : attn::testing::instance<T> {
    sigmoid_attention op;

    template <attn::Scalar S>
    void define(const attn::inputs<S>& in, const attn::outputs<S>& out) const {
        const auto s = out.values.shape();
        std::vector<S> sums(static_cast<std::size_t>(s.channels));
        for (attn::index_t b = 0; b < s.batch; ++b)
            for (attn::index_t h = 0; h < s.heads; ++h)
                for (attn::index_t i = 0; i < s.tokens; ++i)
                    op.attend_query<S>(in, out.values, b, h, h / (s.heads / in.keys.shape().heads), i, sums.data());
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
        return 2.0 * static_cast<double>(p.batch * p.heads * p.queries * p.keys) * static_cast<double>(p.key_dim + p.value_dim);
    }
};

const attn::testing::registered sigmoid(
    {
        .name = "sigmoid",
        .cost = "2 n m (d_k + d_v)",
        .has_log_sum_exp = false,
        .supports = [](const auto& p) { return p.batch * p.heads * p.queries * p.keys < attn::index_t{1} << 22; }, // slow, so nothing longer
    },
    []<class T>(const auto&, T) -> std::unique_ptr<attn::testing::instance<T>> { return std::make_unique<sigmoid_instance<T>>(); });

} // namespace my
