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

/// The gradients of the operator's sinks and of its bias, those that it has, in this order.
template <Scalar T, class U, class Op>
struct named_gradients {
    tensor_view<U> sinks;
    score_gradients<decltype(Op::score), U> score;

    named_gradients(const Op& op, const testing::wanted_gradients<U>& wanted) {
        std::size_t number = 0;
        if (!op.sinks.empty()) sinks = wanted.parameter(number++);
        for_bias<T>(op.score, score, [&](const auto&, auto& own) { own.bias = wanted.parameter(number); });
    }
};

template <Scalar T, class Owner>
void add_gradient(operation<T>& result, const std::shared_ptr<const Owner>& own) {
    using Op = std::remove_const_t<decltype(Owner::op)>;
    result.backward = [own](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const testing::wanted_gradients<T>& wanted,
                            const execution& run) {
        const named_gradients<T, T, Op> named(own->op, wanted);
        attn::backward(own->op, in, saved, given, {{wanted.queries, wanted.keys, wanted.values}, named.sinks, named.score}, run);
    };
    result.backward_workspace_bytes = [own](const input_shapes& s, index_t concurrency) { return own->op.template backward_workspace_bytes<T>(s, concurrency); };
    result.parameter_shapes = [own](const input_shapes& s) {
        std::vector<shape> shapes;
        if (!own->op.sinks.empty()) shapes.push_back({1, s.queries.heads, 1, 1});
        score_gradients<decltype(Op::score), T> none;
        for_bias<T>(own->op.score, none, [&](const additive_bias<T>& f, const auto&) { shapes.push_back(f.bias.shape()); });
        return shapes;
    };
    result.reference_gradients = [own](const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given,
                                       const testing::wanted_gradients<bounded<T>>& wanted) {
        const auto& op = own->op;
        const named_gradients<T, bounded<T>, Op> named(op, wanted);
        const reference::score_parameters<bounded<T>, decltype(Op::score), decltype(named.score)> of_score{op.score, named.score};
        reference::softmax_gradients<bounded<T>>(in, given, wanted, named.sinks, op.scale, op.score, op.pattern, op.sinks, of_score);
    };
}

/// The operator with a pattern and a score function; the definition takes the same.
template <Scalar T, Products R = unrounded_products, Pattern P, ScoreFunction S>
    requires testing::is_tested<T>
operation<T> softmax_operation(const softmax_drawn<T>& drawn, const slice& part, const P& pattern, const S& score) {
    using op_type = softmax_attention<P, S, R>;
    struct owner {
        softmax_drawn<T> drawn;
        op_type op;
    };
    const auto own = std::make_shared<const owner>(
        owner{drawn, op_type{.scale = drawn.scale, .score = score, .pattern = pattern, .sinks = drawn.sinks_of(part)}});
    auto result = operation_of<T>(std::shared_ptr<const op_type>(own, &own->op));
    result.reference = [own](const inputs<double>& in, const outputs<double>& out) {
        reference::softmax<double>(in, out, own->op.scale, own->op.score, own->op.pattern, own->op.sinks);
    };
    result.bounds = [own, part](const inputs<T>& in, const outputs<double>& bounds) {
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
        auto terms = own->drawn.terms(part, in.queries.shape().channels);
        terms.sees = [&](index_t b, index_t h, index_t i, index_t j) -> bool { return attn::at(own->op.pattern, b, h).visible(i, j); };
        softmax_bounds({q, k, v, in.positions}, bounds, terms);
    };
    if constexpr (std::same_as<R, unrounded_products>) add_gradient(result, own);
    return result;
}

/// In numbers that the build has not, nothing is compiled.
template <Scalar T, Products R = unrounded_products, Pattern P, ScoreFunction S>
operation<T> softmax_operation(const softmax_drawn<T>&, const slice&, const P&, const S&) {
    return {};
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
operation<T> softmax_plain(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
operation<T> softmax_passes(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
operation<T> softmax_tables(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
operation<T> softmax_scores(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
operation<T> softmax_bias(softmax_kind, const softmax_drawn<T>&, const slice&);
template <Scalar T>
operation<T> softmax_then(softmax_kind, const softmax_drawn<T>&, const slice&);
operation<float> softmax_rounding(softmax_kind, const softmax_drawn<float>&, const slice&);

} // namespace attn::fuzz
