// Pointwise attention, of ready weights and of one's own.
#include "case.hpp"

#include "attn/attention/pointwise_backward.hpp"
#include "attn/attention/sparse_attention.hpp"
#include "attn/reference/pointwise.hpp"
#include "attn/reference/score_gradients.hpp"
#include "attn/score/soft_cap.hpp"

namespace attn::testing {

template <Scalar T, class Op>
class pointwise_instance final : public instance<T> {
public:
    explicit pointwise_instance(Op op) : op_(std::move(op)) {}

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op_, in, out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override { return op_.template workspace_bytes<T>(s, concurrency); }
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op_.template narrow_workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return op_.output_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override { define<double>(in, out); }
    void plain(const inputs<T>& in, const outputs<T>& out) const override { define<T>(in, out); }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override {
        by.pointwise(in, out, detail::score_scale<T>(op_.scale, in.queries.shape().channels), [this](index_t batch, index_t head, index_t i, index_t first_key, T* scores, index_t keys) {
            const auto pattern = at(op_.pattern, batch, head);
            const auto score = score_at(op_.score, batch, head);
            for (index_t j = 0; j < keys; ++j)
                scores[j] = pattern.visible(i, first_key + j) ? static_cast<T>(op_.weight(static_cast<T>(score(scores[j], i, first_key + j)))) : T{0};
        });
    }

    bool has_gradient() const override { return true; }
    /// Of the weight, if it has a parameter, and of the score function.
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> all;
        for_each_parameter(gradients_of<Op, T>{}, [&](const tensor_view<T>&, const shape& each) { all.push_back(each); });
        return all;
    }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op_.template backward_workspace_bytes<T>(s, concurrency);
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        attn::backward(op_, in, saved, d_out, named<T>(wanted), run);
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& d_out, const wanted_gradients<double>& wanted) const override {
        define<double>(in, d_out, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const wanted_gradients<T>& wanted) const override {
        define<T>(in, d_out, wanted);
    }

    double useful_flops(const problem& p) const override { return flops_of(p, &pair_count::visible); }
    double visited_flops(const problem& p) const override { return flops_of(p, &pair_count::visited); }

private:
    void for_each_parameter(const auto& gradients, const auto& f) const {
        op_.check_gradients({}, gradients, [&](const char*, const auto& view, const shape& each) { f(view, each); });
    }
    /// The wanted gradients by their names.
    template <Scalar U>
    gradients_of<Op, U> named(const wanted_gradients<U>& wanted) const {
        gradients_of<Op, U> result{{wanted.queries, wanted.keys, wanted.values}};
        std::size_t number = 0;
        for_each_parameter(result, [&](const tensor_view<U>& view, const shape&) { const_cast<tensor_view<U>&>(view) = wanted.parameter(number++); });
        return result;
    }
    template <Scalar U>
    void define(const inputs<U>& in, const outputs<U>& out) const {
        const auto values = out.values.numbers();
        detail::fill_zero(values);
        reference::pointwise<U>(in, values, op_.weight, detail::score_scale<double>(op_.scale, in.queries.shape().channels), op_.score, op_.pattern);
    }
    template <Scalar U>
    void define(const inputs<U>& in, const output_gradients<U>& d_out, const wanted_gradients<U>& wanted) const {
        const auto result = named<U>(wanted);
        for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values}) detail::fill_zero(*view);
        for (const auto& view : wanted.parameters) detail::fill_zero(view);
        reference::pointwise_gradients<U>(in, d_out.values, wanted, op_.weight, detail::score_scale<double>(op_.scale, in.queries.shape().channels), op_.score, op_.pattern,
                                          [&](index_t b, index_t h, index_t i, index_t j, U x, U ds, U s, U dw) {
            reference::detail::add_parameters(op_.score, result.score, {b, h, i, j}, x, ds);
            if constexpr (requires { result.weight.bias; })
                if (result.weight.bias.data()) result.weight.bias(0, 0, 0, 0) += dw * op_.weight.derivative(s); // by the bias as by the score
        });
    }
    double flops_of(const problem& p, index_t pair_count::* pairs) const {
        return 2.0 * static_cast<double>(p.key_dim + p.value_dim) * static_cast<double>(visited_pairs(op_, p.shapes(), p.positions).*pairs);
    }
    Op op_;
};

template <class Make>
registered pointwise_case(std::string name, std::string cost, Make make) {
    const auto build = [make]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> {
        auto op = make(p);
        return std::make_unique<pointwise_instance<T, decltype(op)>>(std::move(op));
    };
    return registered({.name = std::move(name), .cost = std::move(cost), .has_log_sum_exp = false, .supports = [](const problem&) { return true; }}, build);
}

static const auto sigmoid_case = pointwise_case("sigmoid", "2 n m (d_k + d_v)", [](const problem& p) {
    return pointwise_attention{.weight = sigmoid{.bias = -std::log(static_cast<double>(std::max<index_t>(1, p.keys)))}};
});
/// A weight of one's own, a union of two passes, and a score function that has a parameter.
static const auto own_weight_case = pointwise_case("own_weight_strided", "n^1.5 (d_k + d_v)", [](const problem& p) {
    const auto gaussian = []<class S>(S x) {
        using std::exp;
        return exp(-x * x);
    };
    const auto stride = std::max<index_t>(2, static_cast<index_t>(std::sqrt(static_cast<double>(p.keys))));
    return pointwise_attention{.weight = gaussian, .pattern = sparse_transformer_strided(stride), .score = soft_cap{2}};
});

} // namespace attn::testing
