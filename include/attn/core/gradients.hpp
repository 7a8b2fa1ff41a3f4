// What the gradient of a call reads and writes besides the call's inputs.
#pragma once

#include "inputs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a call wrote, to be read again by its gradient: values (batch, heads, n, d_v) and log_sum_exp (batch, heads, n, 1).
template <Scalar T>
struct saved_outputs {
    tensor_view<const T> values;
    tensor_view<const T> log_sum_exp = {};
};

/// The gradient of a loss with respect to what a call wrote, in the same shapes. Without memory, that of log_sum_exp is 0.
template <Scalar T>
struct output_gradients {
    tensor_view<const T> values;
    tensor_view<const T> log_sum_exp = {};
};

/// The gradient of the loss with respect to what a call read, in the same shapes. A view without memory is not wanted, and not computed.
template <Scalar T>
struct input_gradients {
    tensor_view<T> queries = {};
    tensor_view<T> keys = {};
    tensor_view<T> values = {};
};

/// The same, of a call whose heads are mixed: of h_k heads of queries, h mixed heads and h_v heads of the result.
template <Scalar T>
struct mixed_head_gradients : input_gradients<T> {
    tensor_view<T> logits_mix = {};   ///< (1, 1, h, h_k)
    tensor_view<T> logits_bias = {};  ///< (1, h, 1, 1)
    tensor_view<T> weights_mix = {};  ///< (1, 1, h_v, h)
    tensor_view<T> weights_bias = {}; ///< (1, h_v, 1, 1)
    tensor_view<T> sinks = {};        ///< (1, h, 1, 1)
};

} // namespace attn
