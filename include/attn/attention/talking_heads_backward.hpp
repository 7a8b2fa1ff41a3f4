// The gradient of talking-heads attention.
#pragma once

#include "../kernel/talking/gradient_scheduler.hpp"
#include "backward.hpp"
#include "talking_heads_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, ScoreFunction S, Scalar T>
struct detail::backward_of<talking_heads_attention<P, S>, T> {
    using scheduler = kernel::talking_gradient_scheduler<T>;
    static constexpr bool has_parameters = has_gradients<S, T>;

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return scheduler{op.parameters_for(s), has_parameters}.workspace_bytes(s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const auto& wanted, const execution& run) {
        const auto parameters = op.parameters_for(shapes_of(in));
        const kernel::visible_keys_of<T, P> visible(op.pattern, shapes_of(in), in.positions);
        const kernel::score_slopes_of<T, S> slopes(op.score, wanted.score);
        scheduler{parameters, has_parameters}(in, saved, d_out, wanted, visible, parameters.scored ? &slopes : nullptr, run);
    }
};

} // namespace attn
