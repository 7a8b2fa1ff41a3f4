// How to register a case of talking-heads attention: say how to make the operator, the rest follows from it.
#pragma once

#include "attn/attention/talking_heads_attention.hpp"
#include "attn/attention/talking_heads_backward.hpp"
#include "attn/pattern/passes.hpp"
#include "attn/reference/score_gradients.hpp"
#include "attn/reference/talking_heads.hpp"
#include "case.hpp"

namespace attn::testing {

/// A matrix near the identity, as trained mixings are, for each of the two, and biases.
struct mixings {
    tensor<double> logits, weights;
    std::vector<double> logits_bias, weights_bias;
};
std::shared_ptr<mixings> mixings_of(const problem& p, index_t heads, index_t value_heads);

template <Scalar T, class Op>
class talking_heads_instance final : public instance<T> {
public:
    explicit talking_heads_instance(made<Op> m) : made_(std::move(m)) {}

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op(), in, out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template workspace_bytes<T>(s, concurrency);
    }
    std::size_t least_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template least_workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return op().output_shape(s); }
    shape log_sum_exp_shape(const input_shapes& s) const override { return op().log_sum_exp_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override { by_formula<double>(in, out); }
    void plain(const inputs<T>& in, const outputs<T>& out) const override { by_formula<T>(in, out); }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override {
        const auto scale = op().scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        const auto adjust = [this](index_t batch, index_t head, index_t i, index_t first_key, T* scores, index_t keys) {
            const auto pattern = at(op().pattern, batch, head);
            const auto score = score_at(op().score, batch, head);
            for (index_t j = 0; j < keys; ++j)
                scores[j] = pattern.visible(i, first_key + j) ? static_cast<T>(score(scores[j], i, first_key + j))
                                                              : -std::numeric_limits<T>::infinity();
        };
        constexpr bool plain_dense = std::same_as<decltype(Op::pattern), dense> && std::same_as<decltype(Op::score), identity_score>;
        by.talking_heads(in, out, static_cast<T>(scale),
                         {op().logits_mix, op().logits_bias, op().weights_mix, op().weights_bias, op().sinks},
                         plain_dense ? adjust_row<T>{} : adjust_row<T>{adjust});
    }

    bool has_gradient() const override { return true; }
    std::vector<shape> parameter_shapes(const input_shapes& s) const override {
        std::vector<shape> shapes;
        in_order(gradients<T>{}, [&](const auto&, bool has, const shape& own) {
            if (has) shapes.push_back(own);
        }, s);
        return shapes;
    }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template backward_workspace_bytes<T>(s, concurrency);
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        attn::backward(op(), in, saved, given, named(wanted, shapes_of(in)), run);
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& given, const wanted_gradients<double>& wanted) const override {
        define<double>(in, given, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& given, const wanted_gradients<T>& wanted) const override {
        define<T>(in, given, wanted);
    }

    double useful_flops(const problem& p) const override {
        const auto s = p.shapes();
        const auto heads = op().log_sum_exp_shape(s).heads, value_heads = op().output_shape(s).heads;
        const auto mixed = (op().logits_mix.data() ? heads * p.heads : 0) + (op().weights_mix.data() ? heads * value_heads : 0);
        const auto pairs = static_cast<double>(visited_pairs(op(), s, p.positions).visible);
        return 2 * pairs * static_cast<double>(p.heads * p.key_dim + value_heads * p.value_dim + mixed);
    }

private:
    using score_type = decltype(Op::score);
    template <class U>
    using gradients = typename Op::template gradients<U>;

    const Op& op() const { return made_.op; }
    /// f(view, whether there is such a parameter, shape) for those that have a gradient.
    template <class G, class F>
    void in_order(G&& views, F&& f, const input_shapes& s) const {
        const auto heads = op().log_sum_exp_shape(s).heads, value_heads = op().output_shape(s).heads;
        f(views.logits_mix, op().logits_mix.data() != nullptr, shape{1, 1, heads, s.queries.heads});
        f(views.logits_bias, !op().logits_bias.empty(), shape{1, heads, 1, 1});
        f(views.weights_mix, op().weights_mix.data() != nullptr, shape{1, 1, value_heads, heads});
        f(views.weights_bias, !op().weights_bias.empty(), shape{1, value_heads, 1, 1});
        f(views.sinks, !op().sinks.empty(), shape{1, heads, 1, 1});
        detail::check_score_gradients(op().score, views.score, [&]<class U>(const auto&, const tensor_view<U>& each, const shape& own) {
            f(const_cast<tensor_view<U>&>(each), true, own);
        });
    }
    template <class U>
    gradients<U> named(const wanted_gradients<U>& wanted, const input_shapes& s) const {
        gradients<U> all{{{wanted.queries, wanted.keys, wanted.values}}};
        std::size_t number = 0;
        in_order(all, [&](auto& view, bool has, const shape&) {
            if (has) view = wanted.parameter(number++);
        }, s);
        return all;
    }
    template <class U>
    void define(const inputs<U>& in, const output_gradients<U>& given, const wanted_gradients<U>& wanted) const {
        for (const auto& view : wanted.parameters) detail::fill_zero(view);
        const auto all = named(wanted, shapes_of(in));
        const reference::score_parameters<U, score_type, decltype(all.score)> each_pair{op().score, all.score};
        reference::talking_heads_gradients<U>(in, given, all, op().logits_mix, op().logits_bias, op().weights_mix, op().weights_bias,
                                              op().scale, op().score, op().pattern, op().sinks, each_pair);
        each_pair.end();
    }
    template <class U>
    void by_formula(const inputs<U>& in, const outputs<U>& out) const {
        reference::talking_heads<U>(in, out, op().logits_mix, op().logits_bias, op().weights_mix, op().weights_bias, op().scale, op().score,
                                    op().pattern, op().sinks);
    }
    made<Op> made_;
};

/// Registers a case from make.template operator()<T>(problem), which returns made<talking_heads_attention<...>>.
template <class Make>
registered talking_heads_case(
    std::string name, std::string cost, Make make, std::function<bool(const problem&)> supports = [](const problem&) { return true; }) {
    const auto build = [make]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> {
        auto m = make.template operator()<T>(p);
        return std::make_unique<talking_heads_instance<T, decltype(m.op)>>(std::move(m));
    };
    return registered({.name = std::move(name),
                       .cost = std::move(cost),
                       .heads_stand_alone = false,
                       .supports = std::move(supports)},
                      build);
}

} // namespace attn::testing
