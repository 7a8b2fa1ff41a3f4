// Problems of pointwise attention: any pattern in two passes, a weight with a parameter and those without, with a bias of each pair or none.
#include "others.hpp"
#include "softmax.hpp"

#include <attn/attention/pointwise_backward.hpp>
#include <attn/reference/pointwise.hpp>

namespace attn::fuzz {

namespace {

/// One of the weights without a parameter.
struct drawn_weight {
    index_t kind;
    double keys;

    template <class S>
    S operator()(S x) const {
        using std::tanh;
        return kind == 0 ? S(relu_over{keys}(x)) : kind == 1 ? S(squared_relu()(x)) : S(tanh(x));
    }
};

template <Scalar T, PointwiseWeight F, Pattern P, ScoreFunction S>
class pointwise_operation final : public operation_of<T, pointwise_attention<F, P, S>> {
    using op_type = pointwise_attention<F, P, S>;
    using number = bounded<T>;
    using pointwise_operation::operation_of::op_;

public:
    using pointwise_operation::operation_of::operation_of;

    void reference(const inputs<double>& in, const outputs<double>& out) const override { define(in, out); }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        write_bounds<T>(in, bounds, [&](const auto& known, const auto& out) { define(known, out); });
    }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> shapes;
        op_.check_gradients({}, gradients_of<op_type, T>{}, [&](const char*, const tensor_view<T>&, const shape& each) { shapes.push_back(each); });
        return shapes;
    }
    void reference_gradients(const inputs<number>& in, const output_gradients<number>& d_out, const testing::wanted_gradients<number>& wanted) const override {
        const auto add = [&, of = of_score(wanted)](index_t b, index_t h, index_t i, index_t j, const number& x, const number& ds, const number& s, const number& dw) {
            reference::detail::add_parameters(op_.score, of, {b, h, i, j}, x, ds);
            if constexpr (has_parameter)
                if (const auto bias = of_weight(wanted).bias; bias.data()) bias(0, 0, 0, 0) += dw * op_.weight.derivative(s);
        };
        reference::pointwise_gradients<number>(in, d_out.values, wanted, op_.weight, scale(in.queries.shape()), op_.score, op_.pattern, add);
    }

private:
    static constexpr bool has_parameter = std::same_as<F, sigmoid>;

    gradients_of<op_type, T> gradients(const testing::wanted_gradients<T>& wanted) const override {
        return {{wanted.queries, wanted.keys, wanted.values}, of_weight(wanted), of_score(wanted)};
    }
    template <class U>
    void define(const inputs<U>& in, const outputs<U>& out) const {
        const auto values = out.values.numbers();
        attn::detail::fill_zero(values);
        reference::pointwise<U>(in, values, op_.weight, scale(in.queries.shape()), op_.score, op_.pattern);
    }
    double scale(const shape& queries) const { return attn::detail::score_scale<double>(op_.scale, queries.channels); }
    // The gradients of its parameters: that of a sigmoid's bias, and of a score function's; those that it has, in this order.
    template <class U>
    static score_gradients<F, U> of_weight(const testing::wanted_gradients<U>& wanted) {
        score_gradients<F, U> all;
        if constexpr (has_parameter) all.bias = wanted.parameter(0);
        return all;
    }
    template <class U>
    score_gradients<S, U> of_score(const testing::wanted_gradients<U>& wanted) const {
        return with_bias<T, U>(op_.score, wanted.parameter(has_parameter));
    }
};

template <Scalar T>
any_operation<T> pointwise_of(bool has_bias, const sigmoid* parameter, const drawn_weight& other, const softmax_drawn<T>& d, const slice& s) {
    const auto make = [&]<class F, class S>(const F& weight, const S& score) -> any_operation<T> {
        using P = decltype(d.tree_of(s) | d.stepped_of(s));
        return std::make_unique<pointwise_operation<T, F, P, S>>(
            pointwise_attention<F, P, S>{.weight = weight, .scale = d.scale, .pattern = d.tree_of(s) | d.stepped_of(s), .score = score});
    };
    if (has_bias) return make(other, d.bias_of(s));
    return parameter ? make(*parameter, identity_score{}) : make(other, identity_score{});
}

template <Scalar T>
trial<T> draw_pointwise(draw& random) {
    trial<T> t;
    softmax_drawn<T> d{.size = draw_sizes(random)};
    draw_positions(random, d.size);
    d.tree = draw_pattern(random, d.size);
    d.stepped = draw_stepped_pattern(random, d.size);
    d.bias = std::make_shared<const drawn_bias<T>>(draw_bias<T>(random, d.size));
    if (random.one_in(4)) d.scale = random.real(-1, 1);
    const bool has_bias = random.one_in(3), has_parameter = random.one_in(2);
    const drawn_weight weight{random.number(0, 2), static_cast<double>(random.number(1, 1000))};
    const sigmoid parameter{random.real(-10, 4)};
    static constexpr const char* names[] = {"relu_over", "squared_relu", "tanh"};
    t.size = d.size;
    t.in = draw_given<T>(random, t.size, numbers::usual);
    t.in.positions = t.size.positions();
    t.name = (!has_bias && has_parameter ? "sigmoid of bias " + std::to_string(parameter.bias) : names[weight.kind]) + "; tree " + d.tree->name() +
             "; stepped " + d.stepped->name() + (has_bias ? "; bias " + to_string(d.bias->numbers.shape()) : "");
    const auto own = std::make_shared<const softmax_drawn<T>>(d);
    const auto make = [=](const slice& s) { return pointwise_of(has_bias, has_parameter ? &parameter : nullptr, weight, *own, s); };
    t.op = make({0, t.size.batch, 0, t.size.heads});
    t.part = [own, make](index_t b, index_t g) {
        const auto group = own->size.heads / own->size.kv_heads;
        return make({b, 1, g * group, group});
    };
    return t;
}

} // namespace

outcome check_pointwise(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_pointwise<T>(random); });
}

} // namespace attn::fuzz
