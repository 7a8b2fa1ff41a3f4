// How Linformer runs: some heads at a time, their keys and values are projected into the workspace and attended to there.
#pragma once

#include "../core/heads.hpp"
#include "../pattern/lengths.hpp"
#include "projection.hpp"
#include "softmax_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The projected rows of each head: the first rows[batch * kv_heads + head / group] of them.
struct projected_rows {
    const index_t* rows;
    index_t kv_heads, group;

    constexpr shorter_than at(index_t batch, index_t head) const { return {rows[batch * kv_heads + head / group]}; }
};

/// The memory of a call, and its steps for some heads of keys and values: as many as there are threads, or as fill a quarter of a megabyte.
template <Scalar T, class Op, class Arch>
struct linformer_work {
    using softmax = kernel::softmax_scheduler<T, Arch>;
    static constexpr bool all_visible = std::same_as<decltype(Op::pattern), dense>;
    static constexpr index_t rows_of_task = projected_rows_of_task;

    index_t batches, heads, tokens, max_rows;
    std::size_t task_bytes;
    std::byte* shared;        ///< of the softmax, or of projecting: not at the same time
    bool* seen;               ///< (batches, heads, tokens)
    index_t *kept, *kept_count; ///< the projected rows that a visible token takes part in: (batches, heads, max_rows), and how many
    tensor_view<T> keys, values;

    linformer_work(scratch& memory, const Op& op, const input_shapes& s, index_t concurrency) : tokens(s.keys.tokens), max_rows(0) {
        for (index_t h = 0; h < s.keys.heads; ++h) max_rows = std::max(max_rows, op.key_projection.size(h, tokens));
        const auto row_size = s.keys.channels + s.values.channels;
        const auto bytes_of_head = product(max_rows, row_size, static_cast<index_t>(sizeof(T)));
        const auto at_once = std::max(concurrency, (index_t{1} << 18) / std::max<index_t>(1, bytes_of_head));
        heads = std::clamp<index_t>(s.keys.heads, 1, at_once);
        batches = std::clamp<index_t>(s.keys.batch, 1, std::max<index_t>(1, at_once / heads));

        task_bytes = std::max(op.key_projection.template workspace_bytes<T>(tokens, s.keys.channels),
                              op.for_values().template workspace_bytes<T>(tokens, s.values.channels));
        task_bytes = (task_bytes + alignment - 1) / alignment * alignment;
        const auto softmax_bytes = softmax::workspace_bytes(s, 1, concurrency);
        shared = memory.take<std::byte>(std::max(softmax_bytes, task_bytes * static_cast<std::size_t>(concurrency)));
        seen = memory.take<bool>(batches, heads, tokens);
        kept = memory.take<index_t>(batches, heads, max_rows);
        kept_count = memory.take<index_t>(batches, heads);
        keys = head_major(memory.take<T>(batches, heads, max_rows, s.keys.channels), {batches, heads, max_rows, s.keys.channels});
        values = head_major(memory.take<T>(batches, heads, max_rows, s.values.channels), {batches, heads, max_rows, s.values.channels});
    }

    /// Everything for the keys and values of heads g .. g + kv_heads - 1 in batch entries b .. b + entries - 1.
    void attend_some(const Op& op, const inputs<T>& in, const outputs<T>& out, const execution& run, index_t b, index_t entries, index_t g,
                     index_t kv_heads) const {
        const auto group = in.queries.shape().heads / in.keys.shape().heads;
        const auto blocks = (max_rows + rows_of_task - 1) / rows_of_task;
        run.for_each(entries * kv_heads, [&](index_t task, index_t) { find_rows(op, in, b + task / kv_heads, g + task % kv_heads, task); });
        run.for_each(entries * kv_heads * blocks * 2, [&](index_t task, index_t slice) {
            const auto head = task / (2 * blocks), block = task / 2 % blocks;
            scratch own(shared + task_bytes * static_cast<std::size_t>(slice));
            const auto project = [&](const auto& projection, const auto& from, const auto& to) {
                project_rows(projection, some_heads(from, b + head / kv_heads, 1, g + head % kv_heads, 1), g + head % kv_heads, head, block,
                             own, {to.data() + head * max_rows * to.shape().channels, to.shape().channels, 1});
            };
            if (task % 2 == 0)
                project(op.key_projection, in.keys, keys);
            else
                project(op.for_values(), in.values, values);
        });
        const auto of_chunk = [&](const auto& t) { return some_heads(t, b, entries, g * group, kv_heads * group); };
        const auto projected = [&](const tensor_view<T>& t) -> tensor_view<const T> {
            return head_major(t.data(), {entries, kv_heads, max_rows, t.shape().channels});
        };
        const projected_rows rows{kept_count, kv_heads, group};
        const auto factor = op.scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        const inputs<T> projected_in{of_chunk(in.queries), projected(keys), projected(values)};
        const outputs<T> out_of_chunk{of_chunk(out.values), of_chunk(out.log_sum_exp)};
        const auto visible = kernel::visible_keys_of<T, Arch, projected_rows>(rows, shapes_of(projected_in), projected_in.positions);
        softmax()({projected_in, out_of_chunk, visible, nullptr, static_cast<T>(factor), {}}, run);
    }

private:
    kernel::token_rows<T> tokens_of(const tensor_view<const T>& one_head, index_t head) const {
        return {kernel::rows_of(one_head, 0, 0), tokens, one_head.shape().channels, all_visible ? nullptr : seen + head * tokens};
    }
    /// Which tokens of a head are visible, and which projected rows one of them takes part in.
    void find_rows(const Op& op, const inputs<T>& in, index_t batch, index_t kv_head, index_t head) const {
        if constexpr (!all_visible) {
            const auto pattern = at(op.pattern, batch, kv_head * (in.queries.shape().heads / in.keys.shape().heads));
            find_visible(pattern, {in.positions.first_query[batch], in.queries.shape().tokens, 1}, in.positions.first_key[batch], tokens,
                         seen + head * tokens);
        }
        const auto x = tokens_of(in.keys, head);
        index_t count = 0;
        for (index_t r = 0; r < op.key_projection.size(kv_head, tokens); ++r)
            if (x.any_visible(op.key_projection.range(kv_head, r, tokens)) && x.any_visible(op.for_values().range(kv_head, r, tokens)))
                kept[head * max_rows + count++] = r;
        kept_count[head] = count;
    }
    /// One block of the projected rows of a head, those that are kept, one after the other.
    void project_rows(const auto& projection, const tensor_view<const T>& one_head, index_t kv_head, index_t head, index_t block, scratch& memory,
                      const kernel::row_block<T>& to) const {
        const auto x = tokens_of(one_head, head);
        const index_t* const row = kept + head * max_rows;
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
