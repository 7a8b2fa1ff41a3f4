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

/// The few types of patterns and score functions that problems of softmax attention are put into.
enum class softmax_kind {
    all, past, window, composed,
    stepped, passes, stepped_passes, sparse,
    packed, blocks, neighbors, listed, masked,
    scored, scored_passes,
    biased, biased_composed, biased_passes,
    scored_biased, biased_scored, relative,
    rounding, rounding_passes, // of float only
    count
};

/// Of such a type, on a part of what was drawn, which outlives it.
template <Scalar T>
any_operation<T> softmax_of(softmax_kind, const softmax_drawn<T>&, const slice&);

} // namespace attn::fuzz
