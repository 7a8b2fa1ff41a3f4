// Talking-heads attention: any pattern, any score function, any two mixings of heads, never an n x m matrix.
#pragma once

#include "../../parallel/executor.hpp"
#include "mainloop.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Talking-heads attention as tasks of a query block each; see talking_heads_attention. Shapes have been checked.
/// A query block goes through all keys in blocks, all heads together. Without a second mixing the values are added on the way. With one,
/// they have to wait until every head knows its maximum and sum: the weights of all keys are kept, heads x m numbers per query of the
/// block, if the workspace has room for them; else a second sweep computes them again, by the same steps and thus to the same bits.
template <Scalar T>
class talking_heads_scheduler {
public:
    talking_heads_parameters with;

    /// keeps_weights: all that makes it fast, or else the least.
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, bool keeps_weights) const {
        const auto sizes = with.shape_of(s);
        return detail::bytes_for<head_mixings<T>>(sizes) +
               detail::bytes_for_threads(concurrency, detail::bytes_for<memory_type>(sizes, keeps_weights && sizes.mixes_weights));
    }
    /// Whether the workspace has room for the weights of all keys.
    bool keeps_weights(const input_shapes& s, const execution& run) const {
        return with.weights_mix.data() && run.workspace().size_bytes() >= workspace_bytes(s, run.concurrency(), true);
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const visible_keys& pattern, const score_adjustment<T>* adjustment,
                    const execution& run) const {
        const auto shapes = shapes_of(in);
        const auto s = with.shape_of(shapes);
        const auto batch = shapes.queries.batch, n = shapes.queries.tokens;
        if (batch * n == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        head_mixings<T> mix(memory, s);
        mix.load(with);
        const talking_heads_call<T> call{in, out, s, pattern, adjustment, with, mix, keeps_weights(shapes, run)};
        const detail::slices slices(run.workspace().bytes().data() + memory.used_bytes(),
                                    detail::bytes_for<memory_type>(s, call.keeps_weights));

        const auto blocks_of = [&](index_t step) { return tile_count(n, max_queries, step); };
        index_t tasks = 0;
        for (index_t b = 0; b < batch; ++b) tasks = std::max(tasks, blocks_of(common_step(pattern, s, b)));
        run.for_each(batch * tasks, [&](index_t task, index_t slice) {
            const auto b = task / tasks, t = task % tasks, step = common_step(pattern, s, b);
            if (t >= blocks_of(step)) return;
            auto slice_memory = slices[slice];
            loop_type(slice_memory, call).run(b, tile_at(t, in.positions.first_query[b], n, max_queries, step, loop_type::lanes::size));
        });
    }

private:
    using loop_type = talking_heads_mainloop<T>;
    using memory_type = typename loop_type::memory_type;
    static constexpr auto max_queries = memory_type::max_queries;
};

} // namespace attn::kernel
