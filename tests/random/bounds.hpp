// How far rounding may take a result from its formula: derived, operation by operation, so that a problem drawn in any hour keeps to it.
#pragma once

#include "bounded.hpp"
#include "random_score.hpp"

#include "cases/case.hpp"

#include <functional>
#include <span>

namespace attn::fuzz {

/// A softmax attention as its formula reads (talking_heads_attention.hpp; softmax attention is that without mixings), in all that its
/// rounding depends on.
struct softmax_terms {
    double scale = 1;
    bool exact_scores = false;
    std::function<std::function<bool(index_t query, index_t key)>(index_t batch, index_t head)> sees; ///< absolute positions
    std::function<rounded(rounded, index_t batch, index_t head, index_t query, index_t key)> score = {};
    std::span<const double> sinks = {};
    tensor_view<const double> logits_mix = {}, weights_mix = {};
    std::span<const double> logits_bias = {}, weights_bias = {};
    const tensor<double>*key_error = nullptr, *value_error = nullptr; ///< what keys and values carry already
    double operand_unit = 0; ///< that operands of products are rounded by
    double unit = 0;
    double least = 0; ///< numbers below this may become 0
};

/// Writes the bounds of values and, where asked for, of log_sum_exp. Where the definition is not finite, what it writes means nothing.
void softmax_bounds(const inputs<double>& in, const outputs<double>& bounds, const softmax_terms& terms);

} // namespace attn::fuzz
