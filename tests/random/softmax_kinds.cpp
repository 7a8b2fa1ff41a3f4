// Softmax attention of every kind, with its definition, which takes the same pattern and score function.
#include "softmax.hpp"

#include <attn/attention/products.hpp>

namespace attn::fuzz {

namespace {

/// What definitions ask about pairs of a query and a key, whatever the types of an operator's pattern and score function. It outlives them.
template <Scalar T>
struct defined_pairs {
    reference::detail::visible_pairs pattern;
    reference::detail::pair_scores<double, false> scores;
    reference::detail::pair_scores<bounded<T>, true> slopes;
};

/// Softmax attention with what was drawn for it, which outlives it: what is asked of it whatever its pattern and score function are.
template <Scalar T>
class drawn_softmax_attention : public operation<T> {
public:
    drawn_softmax_attention(const Attention auto& op, const softmax_drawn<T>& drawn, const slice& part)
        : operation<T>(op), drawn_(drawn), part_(part), sinks_(drawn.sinks_of(part)) {}

    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        const auto pairs = this->pairs();
        reference::softmax<double>(in, out, drawn_.scale, pairs.scores, pairs.pattern, sinks_);
    }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        auto terms = drawn_.terms(part_, in.queries.shape().channels);
        terms.sees = pairs().pattern;
        softmax_bounds(in, bounds, terms);
    }
    /// Of sinks and of a bias, those that there are, in this order.
    std::vector<shape> parameter_shapes(const input_shapes& s) const override {
        std::vector<shape> shapes;
        if (!sinks_.empty()) shapes.push_back({1, s.queries.heads, 1, 1});
        if (drawn_.bias) shapes.push_back(drawn_.bias_of(part_).bias.shape());
        return shapes;
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        const auto pairs = this->pairs();
        reference::softmax_gradients<bounded<T>>(in, given, wanted, of_sinks(wanted), drawn_.scale, pairs.slopes, pairs.pattern, sinks_, gives_to(of_bias(wanted)));
    }

protected:
    template <class U>
    tensor_view<U> of_sinks(const testing::wanted_gradients<U>& wanted) const {
        return sinks_.empty() ? tensor_view<U>() : wanted.parameter(0);
    }
    template <class U>
    tensor_view<U> of_bias(const testing::wanted_gradients<U>& wanted) const {
        return wanted.parameter(sinks_.empty() ? 0 : 1);
    }
    virtual defined_pairs<T> pairs() const = 0;
    /// Adds a pair's part to the gradient of the score function's bias.
    virtual reference::detail::pair_gradients<bounded<T>> gives_to(const tensor_view<bounded<T>>& of_bias) const = 0;

private:
    const softmax_drawn<T>& drawn_;
    slice part_;
    std::span<const double> sinks_;
};

template <Scalar T, Pattern P, ScoreFunction S, Products R>
class softmax_operation final : public operation_of<T, softmax_attention<P, S, R>, drawn_softmax_attention<T>> {
public:
    using softmax_operation::operation_of::operation_of;

private:
    using softmax_operation::operation_of::op_;

    typename softmax_attention<P, S, R>::template gradients<T> gradients(const testing::wanted_gradients<T>& wanted) const override {
        return {{wanted.queries, wanted.keys, wanted.values}, this->of_sinks(wanted), with_bias<T, T>(op_.score, this->of_bias(wanted))};
    }
    defined_pairs<T> pairs() const override { return {op_.pattern, op_.score, op_.score}; }
    reference::detail::pair_gradients<bounded<T>> gives_to(const tensor_view<bounded<T>>& of_bias) const override {
        if constexpr (!HasBias<S, T>) return {};
        else return [this, wanted = with_bias<T, bounded<T>>(op_.score, of_bias)](index_t b, index_t h, index_t i, index_t j, const bounded<T>& x, const bounded<T>& dx) {
            reference::detail::add_parameters(op_.score, wanted, {b, h, i, j}, x, dx);
        };
    }
};

} // namespace

template <Scalar T>
any_operation<T> softmax_of(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    using enum softmax_kind;
    const auto with = [&]<Pattern P, ScoreFunction S = identity_score, Products R = unrounded_products>(const P& pattern, const S& score = {}, R = {}) -> any_operation<T> {
        const softmax_attention<P, S, R> op{.scale = d.scale, .score = score, .pattern = pattern, .sinks = d.sinks_of(s)};
        return std::make_unique<softmax_operation<T, P, S, R>>(op, d, s);
    };
    if constexpr (!testing::is_tested<T>) return {}; // nothing is compiled in numbers that the build has not
    else switch (kind) {
        case all: return with(dense{});
        case past: return with(causal{});
        case window: return with(sliding_window(d.length));
        case composed: return with(d.tree_of(s));
        case stepped: return with(d.stepped_of(s));
        case passes: return with(d.tree_of(s) | d.stepped_of(s));
        case stepped_passes: return with(d.stepped_of(s) | d.other_stepped_of(s));
        case sparse: return with(sparse_transformer_strided(d.length));
        case packed: return with(causal{} & *d.documents);
        case blocks: return with(block_sparse{std::as_const(*d.blocks).view(), d.length});
        case neighbors: return with(*d.neighbors);
        case listed: return with(causal{} & *d.lists);
        case masked: return with(*d.mask);
        case scored: return with(d.tree_of(s), d.steps_of(s));
        case scored_passes: return with(d.tree_of(s) | d.stepped_of(s), d.steps_of(s));
        case biased: return with(dense{}, d.bias_of(s));
        case biased_composed: return with(d.tree_of(s), d.bias_of(s));
        case biased_passes: return with(d.tree_of(s) | d.stepped_of(s), d.bias_of(s));
        case scored_biased: return with(d.tree_of(s), composed_score{d.steps_of(s), d.bias_of(s)});
        case biased_scored: return with(d.tree_of(s), composed_score{d.bias_of(s), d.steps_of(s)});
        case relative: return with(d.tree_of(s), d.relative_of(s));
        default:
            if constexpr (!std::same_as<T, float>) return {};
            else if (kind == rounding) return with(d.tree_of(s), d.steps_of(s), bf16_products{});
            else return with(d.stepped_of(s) | d.other_stepped_of(s), identity_score{}, bf16_products{});
        }
}

template any_operation<float> softmax_of(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_of(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
