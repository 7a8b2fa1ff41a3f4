// The gradient of Linformer.
#pragma once

#include "../kernel/linformer/gradient.hpp"
#include "linformer_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <class E, class F, Pattern P>
inline constexpr bool detail::includes_backward<linformer_attention<E, F, P>> = true;

template <class E, class F, Pattern P>
template <Scalar T>
std::size_t linformer_attention<E, F, P>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return detail::bytes_for<kernel::linformer_gradient_work<T, linformer_attention>>(*this, s, concurrency);
}

template <class E, class F, Pattern P>
template <Scalar T>
void linformer_attention<E, F, P>::backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                                            const gradients<T>& wanted, const execution& run) const {
    const auto s = shapes_of(in);
    detail::scratch memory(run.workspace().bytes().data());
    const kernel::linformer_gradient_work<T, linformer_attention> w(memory, *this, s, run.concurrency());
    w.clear_parameters(*this, wanted);
    if (s.queries.size() == 0) return w.clear(wanted);
    w.projected.for_each_part(s.keys, [&](const auto& part) { w.find_some(*this, in, saved, d_out, wanted, run, part); });
}

} // namespace attn
