// The gradient of simplified linear attention.
#pragma once

#include "../kernel/linear/gradient.hpp"
#include "local_backward.hpp"
#include "simplified_linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, Scalar U>
inline constexpr bool detail::includes_backward<simplified_linear_attention<P, U>> = true;

/// The gradient of the keys of all heads, where only that of the encoding is wanted; it lies behind the memory of the kernels.
template <Pattern P, Scalar U>
template <class T>
struct simplified_linear_attention<P, U>::gradient_work {
    tensor_view<T> of_keys;

    gradient_work(detail::scratch& memory, const simplified_linear_attention& op, const input_shapes& s, index_t concurrency) {
        detail::local_backward<T, U>(op).take_memory(memory, kernel::linear_gradient<T, relu, P>::workspace_bytes(s, concurrency), s,
                                                     op.output_shape(s), concurrency);
        if (op.positional_encoding.data()) of_keys = head_major(memory.take<T>(s.keys.size()), s.keys);
    }
};

template <Pattern P, Scalar U>
template <Scalar T>
std::size_t simplified_linear_attention<P, U>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return detail::bytes_for<gradient_work<T>>(*this, s, concurrency);
}

template <Pattern P, Scalar U>
template <Scalar T>
void simplified_linear_attention<P, U>::backward(const inputs<T>& in, const saved_outputs<T>&, const output_gradients<T>& d_out,
                                                 const gradients<T>& wanted, const execution& run) const {
    if constexpr (std::same_as<T, U>) {
        detail::scratch memory(run.workspace().bytes().data());
        const gradient_work<T> work(memory, *this, shapes_of(in), run.concurrency());
        input_gradients<T> of_inputs = wanted;
        if (!of_inputs.keys.data() && wanted.positional_encoding.data()) of_inputs.keys = work.of_keys;
        kernel::linear_gradient<T, relu, P>()({in, d_out.values, of_inputs, relu{}, pattern, positional_encoding, {.eps = eps}}, run);
        detail::local_backward<T, U>(*this).backward(in, pattern, d_out.values, of_inputs.keys, wanted, run);
    }
}

} // namespace attn
