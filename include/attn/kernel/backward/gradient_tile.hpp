// One query block with one run of keys: from scores and dO V^T to the weights and the gradients of the scores.
#pragma once

#include "../../core/tensor_view.hpp"
#include "../../simd/elementary.hpp"
#include "../../simd/exp.hpp"
#include "../../simd/unfused.hpp"
#include "../attend/query_block.hpp"

#include <cmath>
#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What is known of the rows of a query block before any key is looked at.
template <Scalar T>
struct gradient_rows {
    T log_sum_exp[max_block_rows];
    T share[max_block_rows]; ///< of the weights e^(x - log_sum_exp), so that they sum to 1
    T delta[max_block_rows]; ///< dL - D, D = dO . out
};

/// What a row of pointwise attention needs instead: nothing, since its weights are not divided by their sum.
template <Scalar T>
struct no_rows {};

/// Whether a log_sum_exp is so large that rounding it has changed the weights e^(x - log_sum_exp) by more than a few units in the last
/// place, all of a row's alike: half a unit of the last place is their relative error. The weights of such a row are summed again.
template <Scalar T>
bool loses_sum(T log_sum_exp) {
    return std::abs(log_sum_exp) >= T{16} && std::isfinite(log_sum_exp);
}
/// What is to multiply the weights of a row that sum to that, and of its sink.
template <Scalar T>
T share_of(T log_sum_exp, T sum_of_weights) {
    return loses_sum(log_sum_exp) && sum_of_weights != 0 ? 1 / sum_of_weights : T{1};
}
/// The weight e^(sink - log_sum_exp) of a head's sink in a row, before the row's share; 0 without sinks.
template <Scalar T>
T weight_of_sink(std::span<const double> sinks, index_t head, T log_sum_exp) {
    const T sink = sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(sinks[static_cast<std::size_t>(head)]);
    if (sink == -std::numeric_limits<T>::infinity()) return 0;
    return sink == log_sum_exp ? T{1} : simd::exp(sink - log_sum_exp); // infinity - infinity is NaN
}

/// The gradients of sinks, of each head the sum over its rows of P_sink (dL - D), P_sink = share e^(sink - log_sum_exp). share, delta:
/// (batch, heads, n), those of the rows of log_sum_exp. to: (1, heads, 1, 1), which may have no memory.
template <Scalar T>
void find_sink_gradients(const tensor_view<const T>& log_sum_exp, std::span<const double> sinks, const T* share, const T* delta,
                         const tensor_view<T>& to) {
    const auto& s = log_sum_exp.shape();
    for (index_t h = 0; to.data() && h < s.heads; ++h) {
        const bool hidden = static_cast<T>(sinks[static_cast<std::size_t>(h)]) == -std::numeric_limits<T>::infinity();
        double sum = 0;
        for (index_t b = 0; !hidden && b < s.batch; ++b)
            for (index_t row = 0; row < s.tokens; ++row) {
                const auto at = (b * s.heads + h) * s.tokens + row;
                const T weight = share[at] * weight_of_sink(sinks, h, log_sum_exp(b, h, row, 0));
                sum += simd::unfused(static_cast<double>(weight) * static_cast<double>(delta[at]));
            }
        to(0, h, 0, 0) = static_cast<T>(sum);
    }
}

/// Whether so many tasks that each give all gradients, by five products on visible pairs, are done before threads that share parts of them
/// evenly, which take seven.
constexpr bool are_whole_tasks_faster(index_t tasks, index_t concurrency) {
    const auto rounds = (tasks + concurrency - 1) / concurrency;
    return concurrency == 1 || (tasks > 0 && 5 * rounds * concurrency <= 7 * tasks);
}

/// sums += the weights e^(x - log_sum_exp) of each row.
template <Scalar T>
void add_weights(const gradient_rows<T>& rows, const T* x, index_t keys, index_t stride, T* sums) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity(), zero = T{0};
    for (index_t row = 0; row < stride; row += lanes::size) {
        const auto denominator = lanes::load(rows.log_sum_exp + row);
        lanes sum = zero;
        for (auto at = row; at < row + keys * stride; at += stride) {
            const auto score = lanes::load(x + at);
            sum = sum + select(score == hidden, zero, simd::exp_nonpositive(score - denominator));
        }
        (lanes::load(sums + row) + sum).store(sums + row);
    }
}

/// x becomes the weights P = share e^(x - log_sum_exp), dp becomes dS = slope P (dp + delta), each [keys][stride]. Keys whose score is
/// -infinity are hidden: P and dS are 0, whatever the rest holds. slopes: the score function's derivatives, or null where all are 1.
template <Scalar T>
void weigh_gradients(const gradient_rows<T>& rows, T* x, T* dp, const T* slopes, index_t keys, index_t stride) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity(), zero = T{0};
    for (index_t row = 0; row < stride; row += lanes::size) {
        const auto denominator = lanes::load(rows.log_sum_exp + row), share = lanes::load(rows.share + row),
                   delta = lanes::load(rows.delta + row);
        for (auto at = row; at < row + keys * stride; at += stride) {
            const auto score = lanes::load(x + at);
            const auto is_hidden = score == hidden;
            const auto weight = select(is_hidden, zero, share * simd::exp_nonpositive(score - denominator));
            weight.store(x + at);
            auto gradient = weight * (lanes::load(dp + at) + delta);
            if (slopes) gradient = gradient * lanes::load(slopes + at);
            select(is_hidden, zero, gradient).store(dp + at);
        }
    }
}
/// x, whose numbers are weights but for hidden keys, becomes the weights P, dp becomes dS = slope dp; both are 0 for keys whose number is
/// -infinity.
template <Scalar T>
void weigh_gradients(const no_rows<T>&, T* x, T* dp, const T* slopes, index_t keys, index_t stride) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity(), zero = T{0};
    for (index_t at = 0; at < keys * stride; at += lanes::size) {
        const auto weight = lanes::load(x + at);
        const auto is_hidden = weight == hidden;
        select(is_hidden, zero, weight).store(x + at);
        select(is_hidden, zero, lanes::load(slopes + at) * lanes::load(dp + at)).store(dp + at);
    }
}

} // namespace attn::kernel
