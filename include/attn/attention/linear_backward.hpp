// The gradient of linear attention.
#pragma once

#include "../kernel/linear/gradient.hpp"
#include "backward.hpp"
#include "linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <FeatureMap F, Pattern P, Scalar T>
struct detail::backward_of<linear_attention<F, P>, T> {
    using kernel_type = kernel::linear_gradient<T, F, P>;

    static std::size_t workspace_bytes(const auto&, const input_shapes& s, index_t concurrency) {
        return kernel_type::workspace_bytes(s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        kernel_type()({in, d_out.values, wanted, op.feature_map, op.pattern, {}, {op.normalise, op.eps, op.scale}}, run);
    }
};

} // namespace attn
