// Talking-heads attention: any pattern, any score function, any two mixings of heads, never an n x m matrix.
#pragma once

#include "../../parallel/executor.hpp"
#include "mainloop.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What an operator is made of, as in talking_heads_attention.
struct talking_heads_parameters {
    double scale;
    std::span<const double> sinks;
    tensor_view<const double> logits_mix;
    std::span<const double> logits_bias;
    tensor_view<const double> weights_mix;
    std::span<const double> weights_bias;
    bool heads_alike; ///< all mixed heads have the same pattern
    bool scored;      ///< by a function
};

/// Talking-heads attention as tasks of a query block each; see talking_heads_attention. Shapes have been checked.
/// A query block goes through all keys in blocks, all heads together. Without a second mixing the values are added on the way. With one,
/// they have to wait until every head knows its maximum and sum: the weights of all keys are kept, heads x m numbers per query of the
/// block, if the workspace has room for them; else a second sweep computes them again, by the same steps and thus to the same bits.
template <Scalar T>
class talking_heads_scheduler {
public:
    talking_heads_parameters with;

    /// How many heads and channels there are of everything.
    talking_heads_shape shape_of(const input_shapes& s) const {
        const auto heads = with.logits_mix.data() ? with.logits_mix.shape().tokens : s.queries.heads;
        return {.query_heads = s.queries.heads,
                .heads = heads,
                .value_heads = mixes_weights() ? with.weights_mix.shape().tokens : heads,
                .key_channels = s.queries.channels,
                .value_channels = s.values.channels,
                .keys = s.keys.tokens,
                .mixes_logits = with.logits_mix.data() != nullptr,
                .mixes_weights = mixes_weights(),
                .heads_alike = with.heads_alike,
                .scored = with.scored};
    }
    /// keeps_weights: all that makes it fast, or else the least.
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, bool keeps_weights) const {
        detail::scratch memory;
        take_mixings(memory, shape_of(s));
        return memory.used_bytes() +
               static_cast<std::size_t>(concurrency) * loop_type::bytes(shape_of(s), keeps_weights && mixes_weights());
    }
    /// Whether the workspace has room for the weights of all keys.
    bool keeps_weights(const input_shapes& s, const execution& run) const {
        return mixes_weights() && run.workspace().size_bytes() >= workspace_bytes(s, run.concurrency(), true);
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const visible_keys& pattern, const score_adjustment<T>* adjustment,
                    const execution& run) const {
        const auto shapes = shapes_of(in);
        const auto s = shape_of(shapes);
        const auto batch = shapes.queries.batch, n = shapes.queries.tokens;
        if (batch * n == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        auto [logits, weights] = take_mixings(memory, s);
        if (s.mixes_logits) logits.load(with.logits_mix, with.logits_bias);
        if (s.mixes_weights) weights.load(with.weights_mix, with.weights_bias);
        const talking_heads_call<T> call{in,
                                         out,
                                         s,
                                         pattern,
                                         adjustment,
                                         static_cast<T>(with.scale),
                                         with.sinks,
                                         logits,
                                         weights,
                                         !with.weights_bias.empty(),
                                         keeps_weights(shapes, run)};
        const detail::slices slices(run.workspace().bytes().data() + memory.used_bytes(), loop_type::bytes(s, call.keeps_weights));

        const auto blocks_of = [&](index_t step) { return tile_count(n, max_queries, step); };
        const auto step_of_entry = [&](index_t b) { // which all heads promise
            index_t common = 0;
            for (index_t c = 0; c < (with.heads_alike ? 1 : s.heads); ++c)
                common = std::gcd(common, pattern.step(b, c, visible_keys::whole));
            return std::max<index_t>(common, 1);
        };
        index_t tasks = 0;
        for (index_t b = 0; b < batch; ++b) tasks = std::max(tasks, blocks_of(step_of_entry(b)));
        run.for_each(batch * tasks, [&](index_t task, index_t slice) {
            const auto b = task / tasks, t = task % tasks, step = step_of_entry(b);
            if (t >= blocks_of(step)) return;
            auto slice_memory = slices[slice];
            loop_type(slice_memory, call).run(b, tile_at(t, in.positions.first_query[b], n, max_queries, step, loop_type::lanes::size));
        });
    }

private:
    using loop_type = talking_heads_mainloop<T>;
    static constexpr auto max_queries = loop_type::memory_type::max_queries;

    bool mixes_weights() const { return with.weights_mix.data() != nullptr; }
    static std::pair<head_mixing<T>, head_mixing<T>> take_mixings(detail::scratch& memory, const talking_heads_shape& s) {
        const auto logits = head_mixing<T>::take(memory, s.mixes_logits ? s.heads : 0, s.query_heads);
        return {logits, head_mixing<T>::take(memory, s.mixes_weights ? s.value_heads : 0, s.heads)};
    }
};

} // namespace attn::kernel
