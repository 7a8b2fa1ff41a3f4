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

/// Its gradients: that of a sigmoid's bias, and of a score function's; those that it has, in this order.
template <Scalar T, class U, class Op>
struct named_pointwise_gradients {
    score_gradients<decltype(Op::weight), U> weight;
    score_gradients<decltype(Op::score), U> score;

    named_pointwise_gradients(const Op& op, const testing::wanted_gradients<U>& wanted) {
        std::size_t number = 0;
        if constexpr (requires { weight.bias; }) weight.bias = wanted.parameter(number++);
        for_bias<T>(op.score, score, [&](const auto&, auto& own) { own.bias = wanted.parameter(number); });
    }
};

template <Scalar T, PointwiseWeight F, Pattern P, ScoreFunction S>
operation<T> pointwise_operation(const softmax_drawn<T>& drawn, const F& weight, const P& pattern, const S& score) {
    using op_type = pointwise_attention<F, P, S>;
    struct owner {
        softmax_drawn<T> drawn; ///< which keeps what the operator refers to
        op_type op;
    };
    const auto own = std::make_shared<const owner>(owner{drawn, op_type{.weight = weight, .scale = drawn.scale, .pattern = pattern, .score = score}});
    auto result = operation_of<T>(std::shared_ptr<const op_type>(own, &own->op));
    result.reference = [own](const inputs<double>& in, const outputs<double>& out) {
        const auto values = out.values.numbers();
        attn::detail::fill_zero(values);
        reference::pointwise<double>(in, values, own->op.weight, attn::detail::score_scale<double>(own->op.scale, in.queries.shape().channels), own->op.score, own->op.pattern);
    };
    result.bounds = [own](const inputs<T>& in, const outputs<double>& bounds) {
        const auto copy = [](const stored_view<const T>& from) { return bounded_copy<T>(from.numbers()); };
        const auto q = copy(in.queries), k = copy(in.keys), v = copy(in.values);
        tensor<bounded<T>> out(bounds.values.shape());
        reference::pointwise<bounded<T>>({q, k, v, in.positions}, out.view(), own->op.weight, attn::detail::score_scale<double>(own->op.scale, in.queries.shape().channels), own->op.score,
                                         own->op.pattern);
        const auto [batch, heads, n, d_v] = out.shape();
        for (index_t b = 0; b < batch; ++b)
            for (index_t h = 0; h < heads; ++h)
                for (index_t i = 0; i < n; ++i)
                    for (index_t c = 0; c < d_v; ++c) bounds.values(b, h, i, c) = out(b, h, i, c).error();
    };
    result.backward = [own](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const testing::wanted_gradients<T>& wanted,
                            const execution& run) {
        const named_pointwise_gradients<T, T, op_type> named(own->op, wanted);
        attn::backward(own->op, in, saved, d_out, {{wanted.queries, wanted.keys, wanted.values}, named.weight, named.score}, run);
    };
    result.backward_workspace_bytes = [own](const input_shapes& s, index_t concurrency) { return own->op.template backward_workspace_bytes<T>(s, concurrency); };
    result.parameter_shapes = [own](const input_shapes&) {
        std::vector<shape> shapes;
        own->op.check_gradients({}, gradients_of<op_type, T>{}, [&](const char*, const tensor_view<T>&, const shape& each) { shapes.push_back(each); });
        return shapes;
    };
    result.reference_gradients = [own](const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& d_out,
                                       const testing::wanted_gradients<bounded<T>>& wanted) {
        const auto& op = own->op;
        const named_pointwise_gradients<T, bounded<T>, op_type> named(op, wanted);
        using number = bounded<T>;
        reference::pointwise_gradients<number>(in, d_out.values, wanted, op.weight, attn::detail::score_scale<double>(op.scale, in.queries.shape().channels), op.score, op.pattern,
                                               [&](index_t b, index_t h, index_t i, index_t j, const number& x, const number& ds, const number& s, const number& dw) {
            reference::detail::add_parameters(op.score, named.score, {b, h, i, j}, x, ds);
            if constexpr (std::same_as<F, sigmoid>)
                if (named.weight.bias.data()) named.weight.bias(0, 0, 0, 0) += dw * op.weight.derivative(s);
        });
    };
    return result;
}

template <Scalar T>
operation<T> pointwise_of(bool has_bias, const sigmoid* parameter, const drawn_weight& other, const softmax_drawn<T>& d, const slice& s) {
    const auto pattern = d.tree_of(s) | d.stepped_of(s);
    if (has_bias) return pointwise_operation<T>(d, other, pattern, d.bias_of(s));
    if (parameter) return pointwise_operation<T>(d, *parameter, pattern, identity_score{});
    return pointwise_operation<T>(d, other, pattern, identity_score{});
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
