// The gradient of linear attention.
#pragma once

#include "../kernel/linear/gradient.hpp"
#include "backward.hpp"
#include "linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <FeatureMap F, Pattern P>
inline constexpr bool detail::includes_backward<linear_attention<F, P>> = true;

template <FeatureMap F, Pattern P>
template <Scalar T>
std::size_t linear_attention<F, P>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return kernel::linear_gradient<T, F, P>::workspace_bytes(s, concurrency);
}

template <FeatureMap F, Pattern P>
template <Scalar T>
void linear_attention<F, P>::backward(const inputs<T>& in, const saved_outputs<T>&, const output_gradients<T>& d_out,
                                      const gradients<T>& wanted, const execution& run) const {
    kernel::linear_gradient<T, F, P>()(
        {in, d_out.values, wanted, feature_map, pattern, {}, {.normalise = normalise, .eps = eps, .scale = scale}}, run);
}

} // namespace attn
