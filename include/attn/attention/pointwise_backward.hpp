// The gradient of pointwise attention.
#pragma once

#include "pointwise_attention.hpp"
#include "softmax_backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <PointwiseWeight F, Pattern P, ScoreFunction S>
inline constexpr bool detail::includes_backward<pointwise_attention<F, P, S>> = true;

template <PointwiseWeight F, Pattern P, ScoreFunction S>
template <Scalar T>
std::size_t pointwise_attention<F, P, S>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return kernel::softmax_gradient_scheduler<T, kernel::no_rows<T>>::workspace_bytes(
        s, concurrency, detail::has_gradients<S, T> || detail::has_gradients<F, T>);
}

template <PointwiseWeight F, Pattern P, ScoreFunction S>
template <Scalar T>
void pointwise_attention<F, P, S>::backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                                            const gradients<T>& wanted, const execution& run) const {
    using weights_type = composed_score<S, detail::weight_of_score<F>>;
    const kernel::visible_keys_of<T, P> visible(pattern, shapes_of(in), in.positions);
    const weights_type weights(score, {weight});
    const score_gradients<weights_type, T> of_weights(wanted.score, wanted.weight);
    const kernel::score_slopes_of<T, weights_type> slopes(weights, of_weights);
    kernel::softmax_gradient_scheduler<T, kernel::no_rows<T>>()(
        {in, saved, d_out, wanted, visible, &slopes, detail::score_scale<T>(scale, in.queries.shape().channels)}, {}, {},
        detail::has_gradients<S, T> || detail::has_gradients<F, T>, run);
}

} // namespace attn
