// How Linformer runs: some heads at a time, their keys and values are projected into the workspace and attended to there.
#pragma once

#include "../core/heads.hpp"
#include "../pattern/lengths.hpp"
#include "projection.hpp"
#include "softmax_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The values are projected as the keys are, by the same parameters (E = F).
struct shared_projection {
    template <Scalar>
    using gradients = no_gradients;
};

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

    /// least: bytes that `shared` has in any case.
    linformer_work(scratch& memory, const Op& op, const input_shapes& s, index_t concurrency, std::size_t least = 0)
        : tokens(s.keys.tokens), max_rows(projected_shape<T>(op.key_projection, s.keys).tokens) {
        const auto row_size = s.keys.channels + s.values.channels;
        const auto bytes_of_head = product(max_rows, row_size, static_cast<index_t>(sizeof(T)));
        const auto at_once = std::max(concurrency, (index_t{1} << 18) / std::max<index_t>(1, bytes_of_head));
        heads = std::clamp<index_t>(s.keys.heads, 1, at_once);
        batches = std::clamp<index_t>(s.keys.batch, 1, std::max<index_t>(1, at_once / heads));

        task_bytes = std::max(op.key_projection.template workspace_bytes<T>(tokens, s.keys.channels),
                              op.for_values().template workspace_bytes<T>(tokens, s.values.channels));
        task_bytes = (task_bytes + alignment - 1) / alignment * alignment;
        const auto softmax_bytes = softmax::workspace_bytes(s, 1, concurrency, true);
        shared = memory.take<std::byte>(std::max({least, softmax_bytes, task_bytes * static_cast<std::size_t>(concurrency)}));
        seen = memory.take<bool>(batches, heads, tokens);
        kept = memory.take<index_t>(batches, heads, max_rows);
        kept_count = memory.take<index_t>(batches, heads);
        keys = head_major(memory.take<T>(batches, heads, max_rows, s.keys.channels), {batches, heads, max_rows, s.keys.channels});
        values = head_major(memory.take<T>(batches, heads, max_rows, s.values.channels), {batches, heads, max_rows, s.values.channels});
    }

    /// Batch entries b .. b + entries - 1, and heads g .. g + kv_heads - 1 of their keys and values.
    struct part {
        index_t b, entries, g, kv_heads;
    };
    /// Calls f(part) for all of the batch entries and heads, in order.
    void for_each_part(const shape& all, const auto& f) const {
        for (index_t b = 0; b < all.batch; b += batches)
            for (index_t g = 0; g < all.heads; g += heads) f(part{b, std::min(batches, all.batch - b), g, std::min(heads, all.heads - g)});
    }
    /// The part of a tensor that has as many heads as the queries.
    template <class U>
    static auto of_queries(const U& t, const part& p, const inputs<T>& in) {
        const auto group = in.queries.shape().heads / in.keys.shape().heads;
        return some_heads(t, p.b, p.entries, p.g * group, p.kv_heads * group);
    }
    /// The projected rows of a part.
    template <class U>
    tensor_view<U> of_part(const tensor_view<U>& t, const part& p) const {
        return head_major(t.data(), {p.entries, p.kv_heads, max_rows, t.shape().channels});
    }
    /// What softmax attention reads for a part.
    inputs<T> projected(const inputs<T>& in, const part& p) const {
        return {of_queries(in.queries, p, in), of_part<T>(keys, p), of_part<T>(values, p)};
    }
    /// Calls f(the keys that it sees there, the factor of its scores).
    void with_visible(const Op& op, const inputs<T>& in, const part& p, const inputs<T>& projected_in, const auto& f) const {
        const projected_rows rows{kept_count, p.kv_heads, in.queries.shape().heads / in.keys.shape().heads};
        const auto factor = op.scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        const auto visible = kernel::visible_keys_of<T, Arch, projected_rows>(rows, shapes_of(projected_in), projected_in.positions);
        f(visible, static_cast<T>(factor));
    }
    /// Projects keys and values.
    void project_some(const Op& op, const inputs<T>& in, const execution& run, const part& p) const {
        const auto [b, entries, g, kv_heads] = p;
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
    }
    /// Everything for a part.
    void attend_some(const Op& op, const inputs<T>& in, const outputs<T>& out, const execution& run, const part& p) const {
        project_some(op, in, run, p);
        const auto projected_in = projected(in, p);
        const outputs<T> out_of_part{of_queries(out.values, p, in), of_queries(out.log_sum_exp, p, in)};
        with_visible(op, in, p, projected_in, [&](const auto& visible, T factor) { softmax()({projected_in, out_of_part, visible, nullptr, factor, {}}, run); });
    }
    /// The tokens of a head, of `head` among those of the part.
    kernel::token_rows<T> tokens_of(const stored_view<const T>& one_head, index_t head) const {
        return {kernel::rows_of(one_head, 0, 0), tokens, one_head.shape().channels, all_visible ? nullptr : seen + head * tokens};
    }
    /// Calls f(row, count, first) for the runs of projected rows of a head, those that are kept number first to end - 1: row .. row + count - 1, which
    /// lie from number `first` on.
    void for_each_kept(index_t head, index_t first, index_t end, const auto& f) const {
        const index_t* const row = kept + head * max_rows;
        end = std::min(kept_count[head], end);
        while (first < end) {
            auto next = first + 1;
            while (next < end && row[next] == row[next - 1] + 1) ++next;
            f(row[first], next - first, first);
            first = next;
        }
    }

private:
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
    void project_rows(const auto& projection, const stored_view<const T>& one_head, index_t kv_head, index_t head, index_t block, scratch& memory,
                      const kernel::row_block<T>& to) const {
        const auto x = tokens_of(one_head, head);
        for_each_kept(head, block * rows_of_task, (block + 1) * rows_of_task, [&](index_t row, index_t count, index_t at) {
            auto own = memory;
            projection.project(x, kv_head, row, count, kernel::row_block<T>{to.data + at * to.row_stride, to.row_stride, 1}, own);
        });
    }
};

} // namespace detail

} // namespace attn
