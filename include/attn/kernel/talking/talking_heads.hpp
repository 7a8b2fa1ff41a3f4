// Talking-heads attention: any pattern, any score function, any two mixings of heads, never an n x m matrix.
#pragma once

#include "../../parallel/executor.hpp"
#include "panel.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Talking-heads attention as tasks of a panel each; see talking_heads_attention. Shapes have been checked.
/// A panel of queries goes through all keys in blocks, all heads together. Without a second mixing the values are added on the way. With
/// one, they have to wait until every head knows its maximum and sum: the weights of all keys are kept, heads x m numbers per query of the
/// panel, if the workspace has room for them; else a second pass computes them again, by the same steps and thus to the same bits.
template <Scalar T, class Arch>
class talking_heads {
public:
    talking_heads_call<T> call;

    /// roomy: all that makes it fast, or else the least.
    std::size_t workspace_bytes(const input_shapes& s, index concurrency, bool roomy) const {
        if (s.queries.batch == 0) return 0; // there is no head whose score function could be asked
        detail::scratch memory;
        take_mixings(memory, tile_shape(s));
        return memory.used_bytes() + static_cast<std::size_t>(concurrency) * slice_bytes(s, roomy);
    }
    bool is_roomy(const input_shapes& s, const execution& run) const {
        return run.workspace().size_bytes() >= workspace_bytes(s, run.concurrency(), true);
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto shapes = shapes_of(in);
        const auto s = tile_shape(shapes);
        const auto batch = shapes.queries.batch, n = shapes.queries.tokens;
        if (batch * n == 0) return;
        const bool roomy = is_roomy(shapes, run);
        detail::scratch memory(run.workspace().bytes().data());
        auto mixings = take_mixings(memory, s);
        if (s.mixes_logits) mixings.logits.load(call.logits_mix, call.logits_bias);
        if (s.mixes_weights) mixings.weights.load(call.weights_mix, call.weights_bias);
        std::byte* const slices = run.workspace().bytes().data() + memory.used_bytes();
        const auto bytes = slice_bytes(shapes, roomy);

        index tasks = 0;
        const auto tiles_of = [&](index step) { return tile_count(n, panel::tile_type::most_queries, step); };
        const auto step_of_entry = [&](index b) { // which all heads promise
            index common = 0;
            for (index c = 0; c < (call.differs_by_head ? s.heads : 1); ++c) common = std::gcd(common, call.pattern->step(b, c, visible_keys::whole));
            return std::max<index>(common, 1);
        };
        for (index b = 0; b < batch; ++b) tasks = std::max(tasks, tiles_of(step_of_entry(b)));
        run.for_each(batch * tasks, [&](index task, index slice) {
            const auto b = task / tasks, t = task % tasks, step = step_of_entry(b);
            if (t >= tiles_of(step)) return;
            detail::scratch own(slices + static_cast<std::size_t>(slice) * bytes);
            panel(call, own, s, mixings, roomy)
                .run(in, out, b,
                     tile_at(t, in.positions.first_query[b], n, panel::tile_type::most_queries, step, panel::tile_type::lane_count));
        });
    }

private:
    using panel = talking_heads_panel<T, Arch>;

    index heads_of(const input_shapes& s) const { return call.logits_mix.data() ? call.logits_mix.shape().tokens : s.queries.heads; }
    talking_heads_shape tile_shape(const input_shapes& s) const {
        const auto heads = heads_of(s);
        return {.query_heads = s.queries.heads,
                .heads = heads,
                .value_heads = call.weights_mix.data() ? call.weights_mix.shape().tokens : heads,
                .key_channels = s.queries.channels,
                .value_channels = s.values.channels,
                .keys = s.keys.tokens,
                .mixes_logits = call.logits_mix.data() != nullptr,
                .mixes_weights = call.weights_mix.data() != nullptr};
    }
    static talking_heads_mixings<T, Arch> take_mixings(detail::scratch& memory, const talking_heads_shape& s) {
        const auto rows = s.mixes_logits ? s.heads : 0, value_rows = s.mixes_weights ? s.value_heads : 0;
        auto logits = head_mixing<T, Arch>::take(memory, rows, s.query_heads);
        return {logits, head_mixing<T, Arch>::take(memory, value_rows, s.heads)};
    }
    std::size_t slice_bytes(const input_shapes& s, bool roomy) const {
        detail::scratch memory;
        panel(call, memory, tile_shape(s), {}, roomy);
        return memory.used_bytes();
    }
};

} // namespace attn::kernel
