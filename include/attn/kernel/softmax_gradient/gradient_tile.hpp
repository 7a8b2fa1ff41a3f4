// One query block with one run of keys: from scores and dO V^T to the weights and the gradients of the scores.
#pragma once

#include "../softmax/query_block.hpp"
#include "../../simd/exp.hpp"

#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What is known of the rows of a query block before any key is looked at.
template <Scalar T>
struct gradient_rows {
    T log_sum_exp[max_block_rows];
    T shift[max_block_rows]; ///< dL - D, D = dO . out
};

/// x becomes the weights P = e^(x - log_sum_exp), dp becomes dS = slope P (dp + shift), each [keys][stride]. Keys whose score is -infinity
/// are hidden: P and dS are 0, whatever the rest holds. slopes: the score function's derivatives, or null where all are 1.
template <Scalar T, class Arch>
void weigh_gradients(const gradient_rows<T>& rows, T* x, T* dp, const T* slopes, index_t keys, index_t stride) {
    using lanes = simd::lanes<T, Arch>;
    const lanes hidden = -std::numeric_limits<T>::infinity(), zero = T{0};
    for (index_t row = 0; row < stride; row += lanes::size) {
        const auto denominator = lanes::load(rows.log_sum_exp + row), shift = lanes::load(rows.shift + row);
        for (auto at = row; at < row + keys * stride; at += stride) {
            const auto score = lanes::load(x + at);
            const auto is_hidden = score == hidden;
            const auto weight = select(is_hidden, zero, simd::exp_nonpositive(score - denominator));
            weight.store(x + at);
            auto gradient = weight * (lanes::load(dp + at) + shift);
            if (slopes) gradient = gradient * lanes::load(slopes + at);
            select(is_hidden, zero, gradient).store(dp + at);
        }
    }
}

} // namespace attn::kernel
