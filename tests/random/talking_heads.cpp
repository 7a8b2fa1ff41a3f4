// Problems of talking-heads attention.
#include "others.hpp"
#include "softmax.hpp"

#include <attn/attention/talking_heads_attention.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/reference/talking_heads.hpp>

namespace attn::fuzz {

namespace {

/// The parameters of one problem. What softmax attention has too is drawn for the mixed heads.
template <Scalar T>
struct talking_drawn {
    softmax_drawn<T> softmax;
    tensor<double> logits_mix, weights_mix; ///< without memory for none
    std::vector<double> logits_bias, weights_bias;

    slice all() const { return {0, softmax.size.batch, 0, softmax.size.heads}; }
};

/// The gradients by name, also in numbers that the operator does not compute in.
template <class U, class S>
struct named_gradients : mixed_head_gradients<U> {
    score_gradients<S, U> score = {};
};
/// Those of the parameters that the operator has; that of a bias in its score function is the last.
template <Scalar T, class U, Pattern P, ScoreFunction S>
named_gradients<U, S> named_of_heads(const talking_heads_attention<P, S>& op, const testing::wanted_gradients<U>& wanted) {
    named_gradients<U, S> all{{{wanted.queries, wanted.keys, wanted.values}}};
    std::size_t number = 0;
    const auto take = [&](bool is_there, tensor_view<U>& to) {
        if (is_there) to = wanted.parameter(number++);
    };
    take(op.logits_mix.data(), all.logits_mix);
    take(!op.logits_bias.empty(), all.logits_bias);
    take(op.weights_mix.data(), all.weights_mix);
    take(!op.weights_bias.empty(), all.weights_bias);
    take(!op.sinks.empty(), all.sinks);
    if constexpr (HasBias<S, T>) all.score = with_bias<T, U>(op.score, wanted.parameter(number));
    return all;
}

template <Scalar T, Pattern P, ScoreFunction S>
class talking_operation final : public operation_of<T, talking_heads_attention<P, S>> {
    using talking_operation::operation_of::op_;
    std::shared_ptr<const talking_drawn<T>> drawn_;

public:
    talking_operation(const talking_heads_attention<P, S>& op, const std::shared_ptr<const talking_drawn<T>>& drawn)
        : talking_operation::operation_of(op), drawn_(drawn) {}

    // What can do with less is called by itself.
    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op_, in, out, run); }
    std::size_t least_workspace_bytes(const input_shapes& s, index_t concurrency) const override { return op_.template least_workspace_bytes<T>(s, concurrency); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        reference::talking_heads<double>(in, out, op_.logits_mix, op_.logits_bias, op_.weights_mix, op_.weights_bias, op_.scale, op_.score, op_.pattern, op_.sinks);
    }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        auto terms = drawn_->softmax.terms(drawn_->all(), in.queries.shape().channels);
        terms.sees = reference::detail::visible_pairs(op_.pattern);
        terms.logits_mix = op_.logits_mix, terms.logits_bias = op_.logits_bias;
        terms.weights_mix = op_.weights_mix, terms.weights_bias = op_.weights_bias;
        softmax_bounds(in, bounds, terms);
    }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> shapes;
        const auto push = [&](const auto& mix, const auto& bias) {
            if (mix.data()) shapes.push_back(mix.shape());
            if (!bias.empty()) shapes.push_back({1, std::ssize(bias), 1, 1});
        };
        push(op_.logits_mix, op_.logits_bias);
        push(op_.weights_mix, op_.weights_bias);
        push(tensor_view<const double>(), op_.sinks);
        if constexpr (HasBias<S, T>) shapes.push_back(op_.score.bias.shape());
        return shapes;
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        const auto all = named_of_heads<T>(op_, wanted);
        const reference::score_parameters<bounded<T>, S, decltype(all.score)> each_pair{op_.score, all.score};
        reference::talking_heads_gradients<bounded<T>>(in, given, all, op_.logits_mix, op_.logits_bias, op_.weights_mix, op_.weights_bias, op_.scale, op_.score, op_.pattern,
                                                       op_.sinks, each_pair);
    }

private:
    typename talking_heads_attention<P, S>::template gradients<T> gradients(const testing::wanted_gradients<T>& wanted) const override {
        const auto all = named_of_heads<T>(op_, wanted);
        return {all, all.score};
    }
};

template <Scalar T, Pattern P, ScoreFunction S>
any_operation<T> talking_of(const std::shared_ptr<const talking_drawn<T>>& d, const P& pattern, const S& score) {
    const auto view = [](const tensor<double>& mix) { return mix.data() ? mix.view() : tensor_view<const double>(); };
    const talking_heads_attention<P, S> op{.logits_mix = view(d->logits_mix),
                                           .logits_bias = d->logits_bias,
                                           .weights_mix = view(d->weights_mix),
                                           .weights_bias = d->weights_bias,
                                           .scale = d->softmax.scale,
                                           .score = score,
                                           .pattern = pattern,
                                           .sinks = d->softmax.sinks_of(d->all())};
    return std::make_unique<talking_operation<T, P, S>>(op, d);
}

} // namespace

template <Scalar T>
trial<T> draw_talking_heads(draw& random) {
    trial<T> t;
    t.size = draw_sizes(random);
    t.size.heads = std::min<index_t>(t.size.heads, 6);
    if (t.size.heads % std::max<index_t>(1, t.size.kv_heads) != 0) t.size.heads = t.size.kv_heads;
    draw_positions(random, t.size);
    const auto drawn = std::make_shared<talking_drawn<T>>();
    auto& d = drawn->softmax;
    d.size = t.size;
    const auto matrix = [&](index_t rows, index_t columns) {
        return filled<double>({1, 1, rows, columns}, [&] { return random.real(-1, 1); });
    };
    const auto bias = [&](index_t heads) {
        std::vector<double> numbers(random.one_in(2) ? static_cast<std::size_t>(heads) : 0);
        std::ranges::generate(numbers, [&] { return random.real(-1, 1); });
        return numbers;
    };
    const bool some = t.size.heads > 0;
    if (some && !random.one_in(4)) { // mixed heads
        d.size.heads = random.number(1, 7);
        drawn->logits_mix = matrix(d.size.heads, t.size.heads);
        drawn->logits_bias = bias(d.size.heads);
    }
    auto value_heads = d.size.heads;
    if (some && !random.one_in(4)) {
        value_heads = random.number(1, 7);
        drawn->weights_mix = matrix(value_heads, d.size.heads);
        drawn->weights_bias = bias(value_heads);
    }
    const auto kind = random.number(0, 2);
    d.tree = draw_pattern(random, d.size);
    d.stepped = draw_stepped_pattern(random, d.size);
    d.order = kind == 0 ? score_order::steps : kind == 1 ? score_order::bias : score_order::none;
    d.steps = std::make_shared<const score_steps>(draw_score(random, d.size, static_cast<double>(std::numeric_limits<T>::lowest())));
    if (kind == 1) d.bias = std::make_shared<const drawn_bias<T>>(draw_bias<T>(random, d.size));
    std::vector<double> sinks(random.one_in(3) ? static_cast<std::size_t>(d.size.heads) : 0);
    std::ranges::generate(sinks, [&] { return random.real(-4, 4); });
    d.sinks = std::make_shared<const std::vector<double>>(sinks);
    t.in = draw_given<T>(random, t.size, random.one_in(6) ? numbers::peaked : random.one_in(6) ? numbers::equal : numbers::usual);
    // The heads of v are a divisor of those of the result.
    auto v_heads = some ? random.number(1, value_heads) : 0;
    while (v_heads > 1 && value_heads % v_heads != 0) --v_heads;
    t.in.values = filled<T>({t.size.batch, v_heads, t.size.keys, t.size.value_dim}, [&] { return random.real(-2, 2); });

    const std::shared_ptr<const talking_drawn<T>> own = drawn;
    t.op = kind == 0   ? talking_of<T>(own, own->softmax.tree_of(own->all()), own->softmax.steps_of(own->all()))
           : kind == 1 ? talking_of<T>(own, own->softmax.tree_of(own->all()), own->softmax.bias_of(own->all()))
                       : talking_of<T>(own, own->softmax.stepped_of(own->all()), identity_score{});
    t.name = joined(d.size.heads, " mixed heads", drawn->logits_mix.data() ? "" : " (none)", ", ", value_heads, " of values", drawn->weights_mix.data() ? "; " : " (none); ",
                    kind == 2 ? "stepped " + d.stepped->name() : "tree " + d.tree->name(),
                    kind == 0 ? "; steps " + d.steps->name() : kind == 1 ? joined("; bias ", d.bias->numbers.shape()) : "", sinks.empty() ? "" : "; sinks");
    return t;
}

outcome check_talking_heads(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_talking_heads<T>(random); });
}

} // namespace attn::fuzz
