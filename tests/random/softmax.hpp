// Problems of softmax attention: what is drawn, and the few static types that it is put into.
#pragma once

#include "bounds.hpp"
#include "operation.hpp"
#include "random_pattern.hpp"
#include "random_score.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/pattern/neighborhood.hpp>
#include <attn/pattern/selected.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/score_gradients.hpp>
#include <attn/reference/number.hpp>

namespace attn::fuzz {

/// Batch entries and heads of a problem.
struct slice {
    index_t batch, batches, head, heads;
};

enum class score_order { none, steps, bias, steps_bias, bias_steps, relative };

/// The parameters of one problem. Copies share what is large.
template <Scalar T>
struct softmax_drawn {
    sizes size;
    std::optional<double> scale = {};
    bool exact_scores = false;
    double operand_unit = 0; ///< that operands of products are rounded by
    std::shared_ptr<const std::vector<double>> sinks = {};
    std::shared_ptr<const pattern_tree> tree = {}, stepped = {}, other_stepped = {};
    score_order order = score_order::none;
    std::shared_ptr<const score_steps> steps = {};
    std::shared_ptr<const drawn_bias<T>> bias = {};
    std::shared_ptr<const drawn_relative<T>> relative = {};
    index_t length = 1;                             ///< of a window, a stride, a block
    std::shared_ptr<const tensor<bool>> blocks{}; ///< block_sparse, for positions from 0 on
    std::shared_ptr<const segments> documents{};
    std::shared_ptr<const tiles> mask{};
    std::shared_ptr<const neighborhood<2>> neighbors{};
    std::shared_ptr<const selected> lists{};

    random_pattern tree_of(const slice& s) const { return {tree.get(), s.batch, s.head}; }
    random_stepped_pattern stepped_of(const slice& s) const { return {stepped.get(), s.batch, s.head}; }
    random_stepped_pattern other_stepped_of(const slice& s) const { return {other_stepped.get(), s.batch, s.head}; }
    random_score steps_of(const slice& s) const { return {steps.get(), s.head}; }
    additive_bias<T> bias_of(const slice& s) const { return bias->part(s.batch, s.batches, s.head, s.heads); }
    part_of<drawn_relative<T>> relative_of(const slice& s) const { return {relative.get(), s.batch, s.head}; }
    std::span<const double> sinks_of(const slice& s) const {
        if (sinks->empty()) return {};
        return std::span(*sinks).subspan(static_cast<std::size_t>(s.head), static_cast<std::size_t>(s.heads));
    }

    /// The score function on a number with an error, as `order` says.
    rounded score(rounded x, index_t batch, index_t head, index_t query, index_t key) const;
    softmax_terms terms(const slice& s, index_t key_dim) const {
        softmax_terms t{.scale = scale.value_or(1 / std::sqrt(static_cast<double>(key_dim))), .exact_scores = exact_scores, .sees = {}};
        t.sinks = sinks_of(s);
        t.operand_unit = operand_unit;
        t.unit = unit_of<T>;
        t.least = static_cast<double>(std::numeric_limits<T>::min());
        if (order != score_order::none)
            t.score = [this](rounded x, index_t b, index_t h, index_t i, index_t j) { return score(x, b, h, i, j); };
        return t;
    }
};

/// Calls f(additive_bias, its gradients) for one in a score function, or in a chain of them.
template <Scalar T, class S, class G>
void for_bias(const S& score, G& gradients, const auto& f) {
    if constexpr (std::same_as<S, additive_bias<T>>) f(score, gradients);
    else if constexpr (requires { std::get<additive_bias<T>>(score.functions); }) {
        const auto call = [&]<std::size_t... n>(std::index_sequence<n...>) {
            (for_bias<T>(std::get<n>(score.functions), std::get<n>(gradients), f), ...);
        };
        call(std::make_index_sequence<std::tuple_size_v<G>>());
    }
}

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

/// A score function that is an additive bias, or a chain with one.
template <class S, class T>
concept HasBias = std::same_as<S, additive_bias<T>> || requires(const S& score) { std::get<additive_bias<T>>(score.functions); };

/// The gradients of a score function's parameters, its bias having that one.
template <Scalar T, class U, class S>
score_gradients<S, U> with_bias(const S&, const tensor_view<U>& of_bias) {
    score_gradients<S, U> all;
    if constexpr (std::same_as<S, additive_bias<T>>) all.bias = of_bias;
    else if constexpr (HasBias<S, T>) std::get<score_gradients<additive_bias<T>, U>>(all).bias = of_bias;
    return all;
}

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

/// The operator with a pattern and a score function; the definition takes the same. In numbers that the build has not, nothing is compiled.
template <Scalar T, Products R = unrounded_products, Pattern P, ScoreFunction S>
any_operation<T> softmax_of(const softmax_drawn<T>& drawn, const slice& part, const P& pattern, const S& score) {
    if constexpr (!testing::is_tested<T>) return {};
    else return std::make_unique<softmax_operation<T, P, S, R>>(
        softmax_attention<P, S, R>{.scale = drawn.scale, .score = score, .pattern = pattern, .sinks = drawn.sinks_of(part)}, drawn, part);
}

/// Each of these is compiled in a file of its own group.
enum class softmax_kind {
    all, past, window, composed,            // softmax_plain
    stepped, passes, stepped_passes, sparse, // softmax_passes
    packed, blocks, neighbors, listed, masked, // softmax_tables
    scored, scored_passes,                   // softmax_scores
    biased, biased_composed, biased_passes,  // softmax_bias
    scored_biased, biased_scored, relative,  // softmax_then
    rounding, rounding_passes,               // softmax_rounding, of float only
    count
};

template <Scalar T>
any_operation<T> softmax_plain(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
any_operation<T> softmax_passes(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
any_operation<T> softmax_tables(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
any_operation<T> softmax_scores(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
any_operation<T> softmax_bias(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
any_operation<T> softmax_then(softmax_kind, const softmax_drawn<T>&, const slice&);
any_operation<float> softmax_rounding(softmax_kind, const softmax_drawn<float>&, const slice&);

} // namespace attn::fuzz
