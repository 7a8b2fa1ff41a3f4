// The gradient of simplified linear attention.
#pragma once

#include "../kernel/linear/gradient.hpp"
#include "local_backward.hpp"
#include "simplified_linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, Scalar U, Scalar T>
struct detail::backward_of<simplified_linear_attention<P, U>, T> {
    using kernel_type = kernel::linear_gradient<T, relu, P>;

    /// The gradient of the keys of all heads, where only that of the encoding is wanted; it lies behind the memory of the kernels.
    struct work {
        tensor_view<T> of_keys;

        work(scratch& memory, const auto& op, const input_shapes& s, index_t concurrency) {
            local_backward<T, U>(op).take_memory(memory, kernel_type::workspace_bytes(s, concurrency), s, op.output_shape(s), concurrency);
            if (op.positional_encoding.data()) of_keys = head_major(memory.take<T>(s.keys.size()), s.keys);
        }
    };

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return bytes_for<work>(op, s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        if constexpr (std::same_as<T, U>) {
            scratch memory(run.workspace().bytes().data());
            const work own(memory, op, shapes_of(in), run.concurrency());
            input_gradients<T> of_inputs = wanted;
            if (!of_inputs.keys.data() && wanted.positional_encoding.data()) of_inputs.keys = own.of_keys;
            kernel_type()({in, d_out.values, of_inputs, relu{}, op.pattern, op.positional_encoding, {.eps = op.eps}}, run);
            local_backward<T, U>(op).backward(in, op.pattern, d_out.values, of_inputs.keys, wanted, run);
        }
    }
};

} // namespace attn
