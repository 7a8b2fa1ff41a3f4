// The gradient of LSH attention.
#pragma once

#include "../kernel/lsh/gradient.hpp"
#include "lsh_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Scalar T>
struct detail::backward_of<lsh_attention<T>, T> {
    using work = kernel::lsh_gradient<T, lsh_attention<T>>;

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        check_rotations(op.name, op.rotations, s.queries);
        return bytes_for<work>(op, s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const auto& wanted, const execution& run) {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens == 0 || !(wanted.queries.data() || wanted.values.data())) return;
        scratch memory(run.workspace().bytes().data());
        const work w(memory, op, s, run.concurrency());
        for (index_t b = 0; b < s.queries.batch; ++b)
            for (index_t h = 0; h < s.queries.heads; h += w.tokens.heads)
                w.add_some(op, in, saved, d_out, wanted, run, b, h, std::min(w.tokens.heads, s.queries.heads - h));
    }
};

} // namespace attn
