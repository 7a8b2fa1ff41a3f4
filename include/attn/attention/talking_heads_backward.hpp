// The gradient of talking-heads attention.
#pragma once

#include "../kernel/talking_gradient/scheduler.hpp"
#include "backward.hpp"
#include "talking_heads_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, ScoreFunction S>
inline constexpr bool detail::includes_backward<talking_heads_attention<P, S>> = true;

template <Pattern P, ScoreFunction S>
template <Scalar T>
std::size_t talking_heads_attention<P, S>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return kernel::talking_gradient_scheduler<T>{parameters_for(s)}.workspace_bytes(s, concurrency);
}

template <Pattern P, ScoreFunction S>
template <Scalar T>
void talking_heads_attention<P, S>::backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                                             const gradients<T>& wanted, const execution& run) const {
    const auto shapes = shapes_of(in);
    const kernel::visible_keys_of<T, P> visible(pattern, shapes, in.positions);
    const score_gradients<S, T> of_score{}; // not wanted
    const kernel::score_slopes_of<T, S> slopes(score, of_score);
    kernel::talking_gradient_scheduler<T>{parameters_for(shapes)}(in, saved, d_out, wanted, visible, scored ? &slopes : nullptr, run);
}

} // namespace attn
