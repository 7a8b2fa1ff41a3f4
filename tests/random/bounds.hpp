// How far rounding may take a result from its formula: derived, operation by operation, so that a problem drawn in any hour keeps to it.
#pragma once

#include "random_score.hpp"

#include "cases/case.hpp"

#include <functional>
#include <span>

namespace attn::fuzz {

/// Half the distance of 1 to the next number: the relative error of one operation.
template <Scalar T>
inline constexpr double unit_of = static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;

/// A softmax attention as its formula reads (talking_heads_attention.hpp; softmax attention is that without mixings), in all that its
/// rounding depends on.
struct softmax_terms {
    double scale = 1;
    bool exact_scores = false;
    std::function<bool(index_t batch, index_t head, index_t query, index_t key)> sees; ///< absolute positions
    std::function<rounded(rounded, index_t batch, index_t head, index_t query, index_t key)> score = {};
    std::span<const double> sinks = {};
    tensor_view<const double> logits_mix = {}, weights_mix = {};
    std::span<const double> logits_bias = {}, weights_bias = {};
    const tensor<double>*key_error = nullptr, *value_error = nullptr; ///< what keys and values carry already
    double unit = 0;
    double least = 0; ///< numbers below this may become 0
};

/// Writes the bounds of values and, where asked for, of log_sum_exp. Where the definition is not finite, what it writes means nothing.
void softmax_bounds(const inputs<double>& in, const outputs<double>& bounds, const softmax_terms& terms);

/// A call of softmax attention, what the definition makes of it, how far the kernel's result may be from that, and the gradient of a loss.
struct gradient_problem {
    inputs<double> in;
    outputs<double> exact, errors;
    output_gradients<double> given;
};

/// Writes the bounds of the gradients, and of that of the sinks where asked for: contiguous. Of score functions whose slope is 1.
void softmax_gradient_bounds(const gradient_problem& problem, const testing::wanted_gradients<double>& bounds, const softmax_terms& terms);

} // namespace attn::fuzz
