// The gradient of recurrent attention.
#pragma once

#include "../kernel/recurrent/gradient.hpp"
#include "recurrent_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Memory: the states of a segment of 1024 tokens and one state for each segment, for each thread. Time: as a forward call or two of the
/// states, and some 5 products more. Of a sequence in pieces that begin at multiples of 16 tokens, with the gradient of each one's first
/// state given to the one before as that of its last, the bits are those of the whole.
template <class Rule, Scalar T>
struct detail::backward_of<recurrent_attention<Rule>, T> {
    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return kernel::recurrent_gradient<T>::workspace_bytes(s, op.rule.terms(), concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        kernel::recurrent_gradient<T>(in, d_out.values, op.rule.terms(), op.first_state, wanted,
                                      op.scale_for(in.keys.shape().channels))(run, run.workspace().bytes().data());
    }
};

} // namespace attn
