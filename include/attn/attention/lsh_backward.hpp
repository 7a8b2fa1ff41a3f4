// The gradient of LSH attention.
#pragma once

#include "../kernel/lsh/gradient.hpp"
#include "lsh_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Scalar T>
inline constexpr bool detail::includes_backward<lsh_attention<T>> = true;

template <Scalar T>
template <Scalar S>
std::size_t lsh_attention<T>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    detail::check_rotations(name, rotations, s.queries);
    return detail::bytes_for<kernel::lsh_gradient<T, lsh_attention>>(*this, s, concurrency);
}

template <Scalar T>
template <Scalar S>
void lsh_attention<T>::backward(const inputs<S>& in, const saved_outputs<S>& saved, const output_gradients<S>& d_out,
                                const gradients<S>& wanted, const execution& run) const {
    const auto s = shapes_of(in);
    if (s.queries.batch * s.queries.heads * s.queries.tokens == 0 || !(wanted.queries.data() || wanted.values.data())) return;
    detail::scratch memory(run.workspace().bytes().data());
    const kernel::lsh_gradient<T, lsh_attention> w(memory, *this, s, run.concurrency());
    for (index_t b = 0; b < s.queries.batch; ++b)
        for (index_t h = 0; h < s.queries.heads; h += w.tokens.heads)
            w.add_some(*this, in, saved, d_out, wanted, run, b, h, std::min(w.tokens.heads, s.queries.heads - h));
}

} // namespace attn
