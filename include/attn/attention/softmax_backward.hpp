// The gradient of softmax attention.
#pragma once

#include "../kernel/backward/scheduler.hpp"
#include "backward.hpp"
#include "softmax_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The gradient of softmax attention, whose keys may come in runs.
template <class Op, Scalar T>
struct resumable_gradient {
    using scheduler = kernel::softmax_gradient_scheduler<T>;
    using wanted_type = typename Op::template gradients<T>;

    const Op& op;

    /// Adds the weights of a run of the keys to their sums (batch, heads, n), of the rows whose log_sum_exp does not tell them well enough.
    /// When all keys have come, kernel::softmax_gradient_scheduler::to_shares makes shares of these.
    void add_weights(const inputs<T>& in, const saved_outputs<T>& saved, T* sums, const execution& run) const {
        with_call(in, saved, {}, {}, nullptr, [&](const auto& call) { scheduler().add_weights(call, sums, has_parameters, run); });
    }
    /// The gradient of a run of the keys, where share (batch, heads, n) multiplies the weights of each row. No share: the keys are all
    /// there are.
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const wanted_type& wanted,
                  const T* share, const execution& run) const {
        with_call(in, saved, d_out, wanted, share,
                  [&](const auto& call) { scheduler()(call, op.sinks, wanted.sinks, has_parameters, run); });
    }

private:
    using score_type = decltype(Op::score);
    static constexpr bool has_parameters = has_gradients<score_type, T>;

    void with_call(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const wanted_type& wanted,
                   const T* share, const auto& f) const {
        const kernel::visible_keys_of<T, decltype(Op::pattern)> visible(op.pattern, shapes_of(in), in.positions);
        const kernel::score_slopes_of<T, score_type> slopes(op.score, wanted.score);
        constexpr bool adjusts = !std::same_as<score_type, identity_score>;
        f(kernel::softmax_gradient_call<T>{in, saved, d_out, wanted, visible, adjusts ? &slopes : nullptr,
                                           score_scale<T>(op.scale, in.queries.shape().channels), share});
    }
};

template <Pattern P, ScoreFunction S, Products R, Scalar T>
struct backward_of<softmax_attention<P, S, R>, T> {
    static std::size_t workspace_bytes(const auto&, const input_shapes& s, index_t concurrency) {
        return kernel::softmax_gradient_scheduler<T>::workspace_bytes(s, concurrency, has_gradients<S, T>);
    }
    static void run(const auto& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const auto& wanted, const execution& run) {
        resumable_gradient<softmax_attention<P, S, R>, T>{op}.backward(in, saved, d_out, wanted, nullptr, run);
    }
};

} // namespace detail

} // namespace attn
