// How to register a case of softmax attention: say how to make the operator, the rest follows from its pattern and score function.
#pragma once

#include "attn/attention/softmax_attention.hpp"
#include "attn/attention/softmax_backward.hpp"
#include "attn/reference/score_gradients.hpp"
#include "attn/reference/softmax.hpp"
#include "case.hpp"

namespace attn::testing {

template <Scalar T, class Op>
class softmax_instance final : public instance<T> {
public:
    explicit softmax_instance(made<Op> m) : made_(std::move(m)) {}

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op(), in, out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override { return op().template workspace_bytes<T>(s, concurrency); }
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template narrow_workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return op().output_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        reference::softmax<double>(in, out, op().scale, op().score, op().pattern, op().sinks);
    }
    /// Of inputs that are rounded, where the operator rounds them for its products.
    void plain(const inputs<T>& in, const outputs<T>& out) const override {
        const auto formula = [&](const inputs<T>& of) { reference::softmax<T>(of, out, op().scale, op().score, op().pattern, op().sinks); };
        if constexpr (rounds) {
            const auto q = rounded(in.queries), k = rounded(in.keys), v = rounded(in.values);
            formula({q, k, v, in.positions});
        } else {
            formula(in);
        }
    }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override {
        const auto scale = op().scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        const auto adjust = [this](index_t batch, index_t head, index_t i, index_t first_key, T* scores, index_t keys) {
            const auto pattern = at(op().pattern, batch, head);
            const auto score = score_at(op().score, batch, head);
            for (index_t j = 0; j < keys; ++j)
                scores[j] = pattern.visible(i, first_key + j) ? static_cast<T>(score(scores[j], i, first_key + j)) : -std::numeric_limits<T>::infinity();
        };
        constexpr bool plain_dense = std::same_as<decltype(Op::pattern), dense> && std::same_as<decltype(Op::score), identity_score>;
        by.softmax(in, out, static_cast<T>(scale), plain_dense ? adjust_row<T>{} : adjust_row<T>{adjust}, op().sinks);
    }

    bool has_gradient() const override { return !rounds; }
    /// Of the sinks, if there are some, and of the score function.
    std::vector<shape> parameter_shapes(const input_shapes& s) const override {
        std::vector<shape> all;
        if (!op().sinks.empty()) all.push_back({1, s.queries.heads, 1, 1});
        detail::check_score_gradients(op().score, score_gradients<score_type, T>{}, [&](const auto&, const auto&, const shape& each) { all.push_back(each); });
        return all;
    }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template backward_workspace_bytes<T>(s, concurrency);
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        if constexpr (!rounds) attn::backward(op(), in, saved, given, {{wanted.queries, wanted.keys, wanted.values}, of_sinks(wanted), of_score(wanted)}, run);
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& given, const wanted_gradients<double>& wanted) const override {
        define<double>(in, given, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& given, const wanted_gradients<T>& wanted) const override {
        define<T>(in, given, wanted);
    }

    double useful_flops(const problem& p) const override { return flops_of(p, &pair_count::visible); }
    double visited_flops(const problem& p) const override { return flops_of(p, &pair_count::visited); }

private:
    using score_type = decltype(Op::score);
    static constexpr bool rounds = !std::same_as<decltype(Op::products), unrounded_products>;

    static tensor<T> rounded(const stored_view<const T>& from) {
        tensor<T> to(from.shape());
        const auto [batch, heads, tokens, channels] = from.shape();
        for (index_t b = 0; b < batch; ++b)
            for (index_t h = 0; h < heads; ++h)
                for (index_t i = 0; i < tokens; ++i)
                    for (index_t c = 0; c < channels; ++c)
                        to(b, h, i, c) = detail::widened<narrow_format::bfloat16>(detail::narrowed<narrow_format::bfloat16>(from(b, h, i, c)));
        return to;
    }
    template <Scalar U>
    tensor_view<U> of_sinks(const wanted_gradients<U>& wanted) const {
        return op().sinks.empty() ? tensor_view<U>{} : wanted.parameter(0);
    }
    template <Scalar U>
    score_gradients<score_type, U> of_score(const wanted_gradients<U>& wanted) const {
        score_gradients<score_type, U> all{};
        std::size_t number = op().sinks.empty() ? 0 : 1;
        detail::check_score_gradients(op().score, all, [&](const auto&, const tensor_view<U>& each, const shape&) { const_cast<tensor_view<U>&>(each) = wanted.parameter(number++); });
        return all;
    }
    template <Scalar U>
    void define(const inputs<U>& in, const output_gradients<U>& given, const wanted_gradients<U>& wanted) const {
        const auto parameters = of_score(wanted);
        for (const auto& view : wanted.parameters)
            for (index_t b = 0; view.data() && b < view.shape().batch; ++b)
                for (index_t h = 0; h < view.shape().heads; ++h)
                    for (index_t i = 0; i < view.shape().tokens; ++i)
                        for (index_t c = 0; c < view.shape().channels; ++c) view(b, h, i, c) = 0;
        const reference::score_parameters<U, score_type, decltype(parameters)> each_pair{op().score, parameters};
        reference::softmax_gradients<U>(in, given, wanted, of_sinks(wanted), op().scale, op().score, op().pattern, op().sinks, each_pair);
        each_pair.end();
    }
    double flops_of(const problem& p, index_t pair_count::* pairs) const {
        return 2.0 * static_cast<double>(p.key_dim + p.value_dim) * static_cast<double>(visited_pairs(op(), p.shapes(), p.positions).*pairs);
    }
    const Op& op() const { return made_.op; }
    made<Op> made_;
};

inline bool any_problem(const problem&) { return true; }

/// Registers a case from make.template operator()<T>(problem), which returns made<softmax_attention<...>>.
template <class Make>
registered softmax_case(std::string name, std::string cost, Make make, std::function<bool(const problem&)> supports = any_problem) {
    const auto build = [make]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> {
        auto m = make.template operator()<T>(p);
        return std::make_unique<softmax_instance<T, decltype(m.op)>>(std::move(m));
    };
    return registered({.name = std::move(name),
                       .cost = std::move(cost),
                       .supports = std::move(supports)},
                      build);
}

} // namespace attn::testing
