// A gradient of talking-heads attention: what it is made of, and its parts.
#pragma once

#include "../../core/gradients.hpp"
#include "../softmax_gradient/gradient_tile.hpp"
#include "../softmax_gradient/score_slopes.hpp"
#include "../softmax/visible_keys.hpp"
#include "../talking/head_mixing.hpp"
#include "../talking/memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a gradient of talking-heads attention is made of.
template <Scalar T>
struct talking_gradient_call {
    const inputs<T>& in;
    const saved_outputs<T>& saved;
    const output_gradients<T>& d_out;
    const mixed_head_gradients<T>& wanted;
    talking_heads_shape shape;
    const visible_keys& pattern;
    const score_slopes<T>* slopes; ///< none if scores stay as they are
    T scale;
    head_mixing<T> logits_mix, weights_mix;           ///< as forward mixes
    head_mixing<T> logits_mix_back, weights_mix_back; ///< their transposes, which gradients go through
    std::span<const double> sinks;                    ///< of the mixed heads, or none
    bool sums_weights;                                ///< D is summed over the keys, or else comes of the saved output
    T *share, *delta;                                 ///< of each row (batch, heads, n) what multiplies its weights, and dZ - D

    /// The weight e^(sink - log_sum_exp) of a head's sink in a row, before the row's share.
    T weight_of_sink(index_t batch, index_t head, index_t row) const {
        return sinks.empty()
                   ? T{0}
                   : kernel::weight_of_sink(static_cast<T>(sinks[static_cast<std::size_t>(head)]), saved.log_sum_exp(batch, head, row, 0));
    }
};

/// Some query blocks, and some key rows.
struct talking_gradient_task {
    index_t batch, step; ///< the step of the entry's query blocks
    index_t first_block, end_block;
    index_t first_key, end_key; ///< rows
};

} // namespace attn::kernel
