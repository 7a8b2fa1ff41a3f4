// Linformer: softmax attention over keys and values that were projected along the sequence.
#pragma once

#include "../pattern/lengths.hpp"
#include "projection.hpp"
#include "softmax_attention.hpp"

namespace attn {

/// The values are projected as the keys are, by the same parameters (E = F).
struct same_projection {};

namespace detail {

template <Scalar T, class Op, class Arch>
struct linformer_work;

/// The projected rows of each head: the first rows[batch * kv_heads + head / group] of them.
struct projected_rows {
    const index* rows;
    index kv_heads, group;

    constexpr shorter_than at(index batch, index head) const { return {rows[batch * kv_heads + head / group]}; }
};

/// Batch entries and heads b .. b + batches - 1, h .. h + heads - 1 of a tensor.
template <class T>
tensor_view<T> some_heads(const tensor_view<T>& t, index b, index batches, index h, index heads) {
    return {t.data() ? t.row(b, h, 0) : nullptr, {batches, heads, t.shape().tokens, t.shape().channels}, t.strides()};
}

} // namespace detail

/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), and projections E and F from m tokens to fewer:
///     out[b, h] = softmax(scale * q[b, h] (E k[b, g])^T) (F v[b, g])            g = h / (heads / kv_heads)
/// the softmax being over the projected rows; log_sum_exp is of those scores. E and F may be any projections that give equally many rows:
/// learned matrices (Linformer), pooling, strided convolutions, the identity, your own; they hold views, so that heads, keys and values,
/// and the operators of many layers can refer to one matrix.
///
/// The pattern says which tokens exist: a hidden one is left out of the projection and never read. It must show a key to all queries of
/// its batch entry or to none, for a projected row is the same to every query: causal attention has no such form and is refused. A
/// projected row none of whose tokens is visible is left out of the softmax; a query that is left with none gives 0, and log_sum_exp
/// -infinity.
///
/// Time: 2 n p (d_k + d_v) flops a head for p projected rows, and for a learned matrix 2 m p (d_k + d_v) for each head of k and v. Memory:
/// the workspace, p (d_k + d_v) numbers for a few heads at a time. The result does not depend on executor, threads, strides or the rest of
/// the batch, bit by bit.
/// Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity".
template <class E, class F = same_projection, Pattern P = dense, class Arch = simd::native>
struct linformer_attention {
    static constexpr std::string_view name = "linformer_attention";

    E key_projection;
    F value_projection = {};          ///< that of the keys if not given
    std::optional<double> scale = {}; ///< 1 / sqrt(d_k) if not given
    P pattern = {};                   ///< which keys exist: the same for all queries

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(
            Projection<E, T>,
            "attn: key_projection is not a projection of such tokens (see attn::Projection); a matrix must have their scalar type");
        if constexpr (!std::same_as<F, same_projection>)
            static_assert(
                Projection<F, T>,
                "attn: value_projection is not a projection of such tokens (see attn::Projection); a matrix must have their scalar type");
        check_inputs(name, in);
        const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
        if (scale && !std::isfinite(*scale)) throw shape_error(name, "scale", "is not finite");
        key_projection.check(projection_context{name, "key_projection", k.heads, k.tokens, k.channels});
        for_values().check(projection_context{name, "value_projection", v.heads, v.tokens, v.channels});
        for (index h = 0; h < k.heads; ++h)
            if (const auto keys = key_projection.size(h, k.tokens), values = for_values().size(h, k.tokens); keys != values)
                throw shape_error(name, "value_projection",
                                  "gives head " + std::to_string(h) + " " + std::to_string(values) + " rows, but key_projection " +
                                      std::to_string(keys));
        attn::check(pattern, detail::pattern_context_of(name, in.positions, shapes_of(in), q.heads));
        for (index b = 0; b < q.batch; ++b)
            for (index h = 0; h < q.heads; ++h) check_pattern(in, b, h);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index concurrency) const {
        detail::scratch memory;
        work<T>(memory, *this, s, concurrency);
        return memory.used_bytes();
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const work<T> w(memory, *this, s, run.concurrency());
        for (index b = 0; b < s.keys.batch; b += w.batches)
            for (index g = 0; g < s.keys.heads; g += w.heads)
                w.attend_some(*this, in, out, run, b, std::min(w.batches, s.keys.batch - b), g, std::min(w.heads, s.keys.heads - g));
    }

    const auto& for_values() const {
        if constexpr (std::same_as<F, same_projection>)
            return key_projection;
        else
            return value_projection;
    }

private:
    /// Throws shape_error unless the pattern shows each key to all queries of a head or to none, and to all heads of a group.
    template <Scalar T>
    void check_pattern(const inputs<T>& in, index batch, index head) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const query_tile queries{in.positions.first_query[batch], q.tokens, 1};
        const auto refuse = [&](index key, const char* problem) {
            throw shape_error(name, "pattern",
                              "shows key " + std::to_string(key) + " of batch entry " + std::to_string(batch) + " to some " + problem);
        };
        const auto for_each_key_run = [&](const auto& own, auto&& f) {
            for_each_run(own, queries, in.positions.first_key[batch], k.tokens, 1, f);
        };
        index keys = 0;
        const auto own = at(pattern, batch, head);
        for_each_key_run(own, [&](const key_run& r) {
            if (!r.full)
                refuse(r.first, "queries and hides it from others: projecting mixes the positions of the keys, so that all queries see a "
                                "key or none does; "
                                "causal attention cannot be projected");
            keys += r.count;
        });
        if constexpr (detail::HasAt<P>) {
            index keys_of_group = 0;
            const auto first_of_group = head / (q.heads / k.heads) * (q.heads / k.heads);
            if (head == first_of_group) return;
            constexpr auto problem = "heads of a group and hides it from others, but they share the projected keys";
            for_each_key_run(at(pattern, batch, first_of_group), [&](const key_run& r) {
                for (index j = 0; j < r.count; ++j)
                    if (!visibility(own.visible(queries.positions(), key_run{r.first + j, 1, 1, true}.positions())).is_all())
                        refuse(r.first + j, problem);
                keys_of_group += r.count;
            });
            if (keys != keys_of_group) refuse(in.positions.first_key[batch], problem);
        }
    }

    template <Scalar T>
    using work = detail::linformer_work<T, linformer_attention, Arch>;
};

namespace detail {

/// The memory of a call, and its steps for some heads of keys and values: as many as there are threads, or as fill a quarter of a megabyte.
template <Scalar T, class Op, class Arch>
struct linformer_work {
    using softmax = kernel::streaming_softmax<T, Arch, projected_rows, identity_score>;
    static constexpr bool all_visible = std::same_as<decltype(Op::pattern), dense>;
    static constexpr index rows_of_task = projected_rows_of_task;

    index batches, heads, tokens, most_rows;
    std::size_t task_bytes;
    std::byte* shared;        ///< of the softmax, or of projecting: not at the same time
    bool* seen;               ///< (batches, heads, tokens)
    index *kept, *kept_count; ///< the projected rows that a visible token takes part in: (batches, heads, most_rows), and how many
    tensor_view<T> keys, values;

    linformer_work(scratch& memory, const Op& op, const input_shapes& s, index concurrency) : tokens(s.keys.tokens), most_rows(0) {
        for (index h = 0; h < s.keys.heads; ++h) most_rows = std::max(most_rows, op.key_projection.size(h, tokens));
        const auto row_size = s.keys.channels + s.values.channels;
        const auto bytes_of_head = most_rows * row_size * static_cast<index>(sizeof(T));
        const auto at_once = std::max(concurrency, (index{1} << 18) / std::max<index>(1, bytes_of_head));
        heads = std::clamp<index>(s.keys.heads, 1, at_once);
        batches = std::clamp<index>(s.keys.batch, 1, std::max<index>(1, at_once / heads));

        task_bytes = std::max(op.key_projection.template workspace_bytes<T>(tokens, s.keys.channels),
                              op.for_values().template workspace_bytes<T>(tokens, s.values.channels));
        task_bytes = (task_bytes + alignment - 1) / alignment * alignment;
        const auto softmax_bytes = softmax::workspace_bytes(s.queries, s.values, identity_score{}, concurrency);
        shared = memory.take<std::byte>(static_cast<index>(std::max(softmax_bytes, task_bytes * static_cast<std::size_t>(concurrency))));
        seen = memory.take<bool>(batches * heads * tokens);
        kept = memory.take<index>(batches * heads * most_rows);
        kept_count = memory.take<index>(batches * heads);
        keys = head_major(memory.take<T>(batches * heads * most_rows * s.keys.channels), {batches, heads, most_rows, s.keys.channels});
        values =
            head_major(memory.take<T>(batches * heads * most_rows * s.values.channels), {batches, heads, most_rows, s.values.channels});
    }

    /// Everything for the keys and values of heads g .. g + kv_heads - 1 in batch entries b .. b + entries - 1.
    void attend_some(const Op& op, const inputs<T>& in, const outputs<T>& out, const execution& run, index b, index entries, index g,
                     index kv_heads) const {
        const auto group = in.queries.shape().heads / in.keys.shape().heads;
        const auto blocks = (most_rows + rows_of_task - 1) / rows_of_task;
        run.for_each(entries * kv_heads, [&](index task, index) { find_rows(op, in, b + task / kv_heads, g + task % kv_heads, task); });
        run.for_each(entries * kv_heads * blocks * 2, [&](index task, index slice) {
            const auto head = task / (2 * blocks), block = task / 2 % blocks;
            scratch own(shared + task_bytes * static_cast<std::size_t>(slice));
            const auto project = [&](const auto& projection, const auto& from, const auto& to) {
                project_rows(projection, some_heads(from, b + head / kv_heads, 1, g + head % kv_heads, 1), g + head % kv_heads, head, block,
                             own, {to.data() + head * most_rows * to.shape().channels, to.shape().channels, 1});
            };
            if (task % 2 == 0)
                project(op.key_projection, in.keys, keys);
            else
                project(op.for_values(), in.values, values);
        });
        const auto of_chunk = [&](const auto& t) { return some_heads(t, b, entries, g * group, kv_heads * group); };
        const auto projected = [&](const tensor_view<T>& t) -> tensor_view<const T> {
            return head_major(t.data(), {entries, kv_heads, most_rows, t.shape().channels});
        };
        const projected_rows rows{kept_count, kv_heads, group};
        const auto factor = op.scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        softmax(rows, identity_score{}, factor, {})({of_chunk(in.queries), projected(keys), projected(values)},
                                                    {of_chunk(out.values), of_chunk(out.log_sum_exp)}, run);
    }

private:
    kernel::token_rows<T> tokens_of(const tensor_view<const T>& one_head, index head) const {
        return {kernel::rows_of(one_head, 0, 0), tokens, one_head.shape().channels, all_visible ? nullptr : seen + head * tokens};
    }
    /// Which tokens of a head are visible, and which projected rows one of them takes part in.
    void find_rows(const Op& op, const inputs<T>& in, index batch, index kv_head, index head) const {
        if constexpr (!all_visible) {
            const auto pattern = at(op.pattern, batch, kv_head * (in.queries.shape().heads / in.keys.shape().heads));
            find_visible(pattern, {in.positions.first_query[batch], in.queries.shape().tokens, 1}, in.positions.first_key[batch], tokens,
                         seen + head * tokens);
        }
        const auto x = tokens_of(in.keys, head);
        index count = 0;
        for (index r = 0; r < op.key_projection.size(kv_head, tokens); ++r)
            if (x.any_visible(op.key_projection.range(kv_head, r, tokens)) && x.any_visible(op.for_values().range(kv_head, r, tokens)))
                kept[head * most_rows + count++] = r;
        kept_count[head] = count;
        // Rows beyond that share a group of keys with the last ones: hidden, but lest they look like a NaN that needs care, zero.
        const auto clear = [&](const tensor_view<T>& t) {
            const auto channels = t.shape().channels, end = std::min(most_rows, count + kernel::softmax_tile<T, Arch>::grain);
            std::fill(t.data() + (head * most_rows + count) * channels, t.data() + (head * most_rows + end) * channels, T{0});
        };
        clear(keys);
        clear(values);
    }
    /// One block of the projected rows of a head, those that are kept, one after the other.
    void project_rows(const auto& projection, const tensor_view<const T>& one_head, index kv_head, index head, index block, scratch& memory,
                      const kernel::row_block<T>& to) const {
        const auto x = tokens_of(one_head, head);
        const index* const row = kept + head * most_rows;
        const auto end = std::min(kept_count[head], (block + 1) * rows_of_task);
        for (auto at = block * rows_of_task; at < end;) {
            auto next = at + 1;
            while (next < end && row[next] == row[next - 1] + 1) ++next;
            auto own = memory;
            projection.project(x, kv_head, row[at], next - at, kernel::row_block<T>{to.data + at * to.row_stride, to.row_stride, 1}, own);
            at = next;
        }
    }
};

} // namespace detail

} // namespace attn
