// How Linformer runs: some heads at a time, their keys and values are projected into the workspace and attended to there.
#pragma once

#include "../../pattern/lengths.hpp"
#include "../projection/token_rows.hpp"
#include "../softmax/scheduler.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The projected rows of each head: the first rows[batch * kv_heads + head / group] of them.
struct projected_rows {
    const index_t* rows;
    index_t kv_heads, group;

    constexpr detail::shorter_than at(index_t batch, index_t head) const { return {rows[batch * kv_heads + head / group]}; }
};

/// Which tokens are visible, and which projected rows are kept, of so many heads of keys and values.
template <Scalar T, class Op>
struct linformer_rows {
    static constexpr bool all_visible = std::same_as<decltype(Op::pattern), dense>;

    index_t batches, heads, tokens, max_rows;
    bool* seen;                 ///< (batches, heads, tokens), unless all are
    index_t *kept, *kept_count; ///< the projected rows that a visible token takes part in: (batches, heads, max_rows), and how many

    linformer_rows(detail::scratch& memory, const Op& op, const shape& all_keys, index_t some_batches, index_t some_heads)
        : batches(some_batches), heads(some_heads), tokens(all_keys.tokens), max_rows(most_rows(op.key_projection, all_keys)),
          seen(memory.take<bool>(all_visible ? 0 : batches, heads, tokens)), kept(memory.take<index_t>(batches, heads, max_rows)),
          kept_count(memory.take<index_t>(batches, heads)) {}

    /// Finds them for one head, `head` among those that there is memory for. Of the inputs, shapes and positions.
    void find(const Op& op, const inputs<T>& in, index_t batch, index_t kv_head, index_t head) const {
        if constexpr (!all_visible) {
            const auto pattern = at(op.pattern, batch, kv_head * (in.queries.shape().heads / in.keys.shape().heads));
            detail::find_visible(pattern, {in.positions.first_query[batch], in.queries.shape().tokens, 1}, in.positions.first_key[batch],
                                 tokens, seen + head * tokens);
        }
        const auto x = tokens_of(in.keys, head);
        index_t count = 0;
        for (index_t r = 0; r < op.key_projection.size(kv_head, tokens); ++r)
            if (x.any_visible(op.key_projection.range(kv_head, r, tokens)) && x.any_visible(op.for_values().range(kv_head, r, tokens)))
                kept[head * max_rows + count++] = r;
        kept_count[head] = count;
    }
    /// The tokens of one head of keys or values.
    token_rows<T> tokens_of(const stored_view<const T>& one_head, index_t head) const {
        return {one_head.rows(0, 0), tokens, one_head.shape().channels, all_visible ? nullptr : seen + head * tokens};
    }
    /// Calls f(row, count, first) for the runs of projected rows of a head, those that are kept, number first to end - 1: row .. row +
    /// count - 1, which lie from number `first` on.
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
};

/// The memory of a call, and its steps for some heads of keys and values: as many as there are threads, or as fill a quarter of a megabyte.
template <Scalar T, class Op>
struct linformer_work {
    using softmax = softmax_scheduler<T>;
    using rows_type = linformer_rows<T, Op>;
    static constexpr index_t rows_of_block = projected_rows_of_task;

    std::size_t task_bytes;
    std::byte* shared; ///< of the softmax, which takes a workspace from its beginning, or of projecting: not at the same time
    rows_type rows;
    tensor_view<T> keys, values;

    /// least: bytes that `shared` has in any case. found: the rows of all heads, if they have been found.
    linformer_work(detail::scratch& memory, const Op& op, const input_shapes& s, index_t concurrency, std::size_t least = 0,
                   const rows_type* found = nullptr)
        : task_bytes(bytes_of_task(op, s)), shared(take_shared(memory, s, concurrency, least)),
          rows(found ? *found : rows_at_once(memory, op, s, concurrency)), keys(take_rows(memory, s.keys)),
          values(take_rows(memory, s.values)) {}

    /// Memory for projected rows of as many channels as tokens have.
    tensor_view<T> take_rows(detail::scratch& memory, const shape& tokens) const {
        const shape own{rows.batches, rows.heads, rows.max_rows, tokens.channels};
        return head_major(memory.take<T>(own.batch, own.heads, own.tokens, own.channels), own);
    }
    /// Batch entries b .. b + entries - 1, and heads g .. g + kv_heads - 1 of their keys and values.
    struct part {
        index_t b, entries, g, kv_heads;
    };
    /// Calls f(part) for all of the batch entries and heads, in order.
    void for_each_part(const shape& all, const auto& f) const {
        for (index_t b = 0; b < all.batch; b += rows.batches)
            for (index_t g = 0; g < all.heads; g += rows.heads)
                f(part{b, std::min(rows.batches, all.batch - b), g, std::min(rows.heads, all.heads - g)});
    }
    /// The part of a tensor that has as many heads as the queries.
    static tensor_part of_queries(const part& p, const inputs<T>& in) {
        const auto group = in.queries.shape().heads / in.keys.shape().heads;
        return {.batch = {p.b, p.entries}, .heads = {p.g * group, p.kv_heads * group}};
    }
    /// The projected rows of a part.
    template <class U>
    tensor_view<U> of_part(const tensor_view<U>& t, const part& p) const {
        return head_major(t.data(), {p.entries, p.kv_heads, rows.max_rows, t.shape().channels});
    }
    /// What softmax attention reads for a part.
    inputs<T> projected(const inputs<T>& in, const part& p) const {
        return {in.queries.slice(of_queries(p, in)), of_part<T>(keys, p), of_part<T>(values, p)};
    }
    /// Calls f(the keys that it sees there, the factor of its scores).
    void with_visible(const Op& op, const inputs<T>& in, const part& p, const inputs<T>& projected_in, const auto& f) const {
        const projected_rows seen{rows.kept_count, p.kv_heads, in.queries.shape().heads / in.keys.shape().heads};
        const auto visible = visible_keys_of<T, projected_rows>(seen, shapes_of(projected_in), projected_in.positions);
        f(visible, detail::score_scale<T>(op.scale, in.queries.shape().channels));
    }
    /// Finds which rows there are, and projects keys and values.
    void project_some(const Op& op, const inputs<T>& in, const execution& run, const part& p) const {
        run.for_each(p.entries * p.kv_heads,
                     [&](index_t head, index_t) { rows.find(op, in, p.b + head / p.kv_heads, p.g + head % p.kv_heads, head); });
        run.for_each(block_count(p), [&](index_t number, index_t slice) {
            for_each_run(op, in, p, number, slice, [](const auto& projection, auto&&... of_run) { projection.project(of_run...); });
        });
    }
    /// Blocks of projected rows of a part, of keys and of values: what is projected at a time.
    index_t block_count(const part& p) const { return p.entries * p.kv_heads * blocks_of_head() * 2; }
    /// f(projection, tokens of all heads, projected rows of all heads, head among those of the part, its first row) of a block.
    auto with_block(const Op& op, const inputs<T>& in, index_t number, const auto& f) const {
        const auto head = number / (2 * blocks_of_head()), first = number / 2 % blocks_of_head() * rows_of_block;
        if (number % 2 == 0) return f(op.key_projection, in.keys, keys, head, first);
        return f(op.for_values(), in.values, values, head, first);
    }
    /// Calls f(projection, tokens, kv_head, row, count, to, memory) for the runs of rows that are kept of a block. They lie one after the
    /// other.
    void for_each_run(const Op& op, const inputs<T>& in, const part& p, index_t number, index_t slice, const auto& f) const {
        with_block(op, in, number, [&](const auto& projection, const auto& from, const auto& to, index_t head, index_t first) {
            for_each_run(p, from, to, head, {first, rows_of_block}, detail::slices(shared, task_bytes)[slice],
                         [&](const auto& x, auto&&... run) { f(projection, x, run...); });
        });
    }
    /// Calls f(tokens, kv_head, row, count, rows, memory) for the runs of rows that are kept of one head, as many of the kept ones as
    /// `some` says: rows are those of `projected`.
    template <class U>
    void for_each_run(const part& p, const stored_view<const T>& from, const tensor_view<U>& projected, index_t head, const row_range& some,
                      const detail::scratch& memory, const auto& f) const {
        const auto b = p.b + head / p.kv_heads, g = p.g + head % p.kv_heads, channels = projected.shape().channels;
        const auto x = rows.tokens_of(from.slice({.batch = {b, 1}, .heads = {g, 1}}), head);
        rows.for_each_kept(head, some.first, some.end(), [&](index_t row, index_t count, index_t at) {
            auto own = memory;
            f(x, g, row, count, row_block<U>{projected.data() + (head * rows.max_rows + at) * channels, channels, 1}, own);
        });
    }
    /// Attends to the projected rows of a part.
    void attend_some(const Op& op, const inputs<T>& in, const outputs<T>& out, const execution& run, const part& p) const {
        const auto projected_in = projected(in, p);
        with_visible(op, in, p, projected_in, [&](const auto& visible, T factor) {
            softmax::attend({projected_in, out.slice(of_queries(p, in)), visible, nullptr, factor, {}}, run);
        });
    }

private:
    index_t blocks_of_head() const { return (rows.max_rows + rows_of_block - 1) / rows_of_block; }
    static std::size_t bytes_of_task(const Op& op, const input_shapes& s) {
        const auto bytes = std::max(op.key_projection.template workspace_bytes<T>(s.keys.tokens, s.keys.channels),
                                    op.for_values().template workspace_bytes<T>(s.keys.tokens, s.values.channels));
        return (bytes + alignment - 1) / alignment * alignment;
    }
    std::byte* take_shared(detail::scratch& memory, const input_shapes& s, index_t concurrency, std::size_t least) const {
        const auto softmax_bytes = softmax::workspace_bytes(s, false, concurrency, true);
        return memory.take<std::byte>(std::max({least, softmax_bytes, detail::bytes_for_threads(concurrency, task_bytes)}));
    }
    static rows_type rows_at_once(detail::scratch& memory, const Op& op, const input_shapes& s, index_t concurrency) {
        const auto max_rows = most_rows(op.key_projection, s.keys);
        const auto bytes_of_head = detail::product(max_rows, s.keys.channels + s.values.channels, static_cast<index_t>(sizeof(T)));
        const auto at_once = std::max(concurrency, (index_t{1} << 18) / std::max<index_t>(1, bytes_of_head));
        const auto heads = std::clamp<index_t>(s.keys.heads, 1, at_once);
        return {memory, op, s.keys, std::clamp<index_t>(s.keys.batch, 1, std::max<index_t>(1, at_once / heads)), heads};
    }
};

} // namespace attn::kernel
