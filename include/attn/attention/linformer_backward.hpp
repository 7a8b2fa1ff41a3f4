// The gradient of Linformer.
#pragma once

#include "../kernel/linformer/gradient.hpp"
#include "linformer_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <class E, class F, Pattern P, Scalar T>
struct detail::backward_of<linformer_attention<E, F, P>, T> {
    using work = kernel::linformer_gradient_work<T, linformer_attention<E, F, P>>;

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return bytes_for<work>(op, s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const auto& wanted, const execution& run) {
        const auto s = shapes_of(in);
        scratch memory(run.workspace().bytes().data());
        const work w(memory, op, s, run.concurrency());
        w.clear_parameters(op, wanted);
        if (s.queries.size() == 0) return w.clear(wanted);
        w.projected.for_each_part(s.keys, [&](const auto& part) { w.find_some(op, in, saved, d_out, wanted, run, part); });
    }
};

} // namespace attn
