// The gradient of pointwise attention.
#pragma once

#include "pointwise_attention.hpp"
#include "softmax_backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <PointwiseWeight F, Pattern P, ScoreFunction S, Scalar T>
struct detail::backward_of<pointwise_attention<F, P, S>, T> {
    using scheduler = kernel::softmax_gradient_scheduler<T, kernel::no_rows<T>>;
    static constexpr bool has_parameters = has_gradients<S, T> || has_gradients<F, T>;

    static std::size_t workspace_bytes(const auto&, const input_shapes& s, index_t concurrency) {
        return scheduler::workspace_bytes(s, concurrency, has_parameters);
    }
    static void run(const auto& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const auto& wanted, const execution& run) {
        using weights_type = composed_score<S, weight_of_score<F>>;
        const kernel::visible_keys_of<T, P> visible(op.pattern, shapes_of(in), in.positions);
        const weights_type weights(op.score, {op.weight});
        const score_gradients<weights_type, T> of_weights(wanted.score, wanted.weight);
        const kernel::score_slopes_of<T, weights_type> slopes(weights, of_weights);
        scheduler()({in, saved, d_out, wanted, visible, &slopes, score_scale<T>(op.scale, in.queries.shape().channels)}, {}, {},
                    has_parameters, run);
    }
};

} // namespace attn
