// Projecting tokens along the sequence as an operation of its own.
#pragma once

#include "../pattern/schedule.hpp"
#include "attention.hpp"
#include "projection.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Bytes of workspace that `project` needs for tokens of that shape with such an executor or execution.
template <Scalar T, Projection<T> P>
std::size_t workspace_bytes(const P& projection, const shape& tokens, const detail::call_execution& run = {}) {
    detail::scratch slice;
    slice.take<bool>(tokens.tokens);
    slice.take<std::byte>(projection.template workspace_bytes<T>(tokens.tokens, tokens.channels));
    return detail::bytes_for_threads(run.concurrency(), slice.used_bytes());
}

namespace detail {

/// The tokens of one batch entry and head, of which those are visible that query 0 sees. `seen` is memory for a flag of each.
template <Scalar T, Pattern V>
kernel::token_rows<T> visible_tokens(const tensor_view<const T>& x, const V& pattern, index_t batch, index_t head, bool* seen) {
    const auto& s = x.shape();
    kernel::token_rows<T> tokens{x.rows(batch, head), s.tokens, s.channels};
    if constexpr (!std::same_as<V, dense>) {
        find_visible(at(pattern, batch, head), {0, 1, 1}, 0, s.tokens, seen);
        tokens.seen = seen;
    }
    return tokens;
}
/// Calls f(row, count, whether they read a visible token) for the runs of a head's projected rows first .. end - 1, of which those that it
/// lacks read none.
template <Scalar T>
void for_each_projected_run(const auto& projection, const kernel::token_rows<T>& tokens, index_t head, index_t first, index_t end,
                            const auto& f) {
    const auto size = projection.size(head, tokens.count);
    const auto present = [&](index_t row) { return row < size && tokens.any_visible(projection.range(head, row, tokens.count)); };
    for (auto row = first; row < end;) {
        const bool has_tokens = present(row);
        auto next = row + 1;
        while (next < end && present(next) == has_tokens) ++next;
        f(row, next - row, has_tokens);
        row = next;
    }
}

/// Throws attention_error unless these tokens can be projected so. The shape of the result.
template <Scalar T, Projection<T> P>
shape check_projected(const P& projection, const tensor_view<const T>& x) {
    constexpr std::string_view name = "project";
    const auto& s = x.shape();
    check_view(name, "x", x);
    projection.check(projection_context{name, "projection", s.heads, s.tokens, s.channels});
    const auto result = projected_shape<T>(projection, s);
    check_shape<T>(name, "projection", result);
    return result;
}

} // namespace detail

/// Projects the tokens x (batch, heads, m, d) to out (batch, heads, p, d), whose channels are contiguous: an operation of its own, as
/// before the linear layers of keys and values. The pattern says which tokens exist, as query 0 sees them; a row that reads none of them is
/// zero, and so are rows that a head lacks. `run` as in `attend`. Its gradient is computed by project_backward.hpp. Throws attention_error,
/// before anything is read or written, if shapes, parameters or a given workspace do not fit.
template <TensorLike X, Projection<detail::scalar_t<X>> P, Pattern V = dense>
void project(const P& projection, const X& from, const tensor_view<detail::scalar_t<X>>& out, const detail::call_execution& run = {},
             const V& pattern = {}) {
    using T = detail::scalar_t<X>;
    constexpr std::string_view name = "project";
    const tensor_view<const T> x = from;
    const auto& s = x.shape();
    detail::check_output(name, "out", out, detail::check_projected(projection, x), inputs<T>{x, x, x});
    const output_memory memory_of_out(name, "out", out);
    projection.check_apart(memory_of_out);
    check_apart(pattern, memory_of_out);
    if (out.strides().channels != 1 && out.shape().channels > 1)
        detail::raise(shape_error(name, "out", "of shape ", out.shape(), " needs contiguous channels"));
    attn::check(pattern, pattern_context{.operation = name, .batch = s.batch, .heads = s.heads, .end_query = 1, .end_key = s.tokens});
    const auto needed = workspace_bytes<T>(projection, s, run);
    run.reserve(name, "x", s, needed);
    const detail::slices slices(run.workspace().bytes().data(), needed / static_cast<std::size_t>(run.concurrency()));

    const auto max_rows = out.shape().tokens, blocks = (max_rows + kernel::projected_rows_of_task - 1) / kernel::projected_rows_of_task;
    run.for_each(s.batch * s.heads * blocks, [&](index_t task, index_t slice) {
        const auto batch = task / blocks / s.heads, head = task / blocks % s.heads, first = task % blocks * kernel::projected_rows_of_task;
        auto memory = slices[slice];
        bool* const seen = memory.take<bool>(s.tokens);
        const auto tokens = detail::visible_tokens<T>(x, pattern, batch, head, seen);
        const auto to = out.rows(batch, head);
        const auto end = std::min(max_rows, first + kernel::projected_rows_of_task);
        detail::for_each_projected_run(projection, tokens, head, first, end, [&](index_t row, index_t count, bool has_tokens) {
            auto own = memory;
            const row_block<T> rows{to.data + row * to.row_stride, to.row_stride, 1};
            if (has_tokens) projection.project(tokens, head, row, count, rows, own);
            else
                for (index_t r = 0; r < count; ++r) std::fill_n(rows.data + r * rows.row_stride, s.channels, T{0});
        });
    });
}

/// The projection of tokens, to a new tensor (batch, heads, p, d): see project(projection, from, out, run, pattern).
template <TensorLike X, Projection<detail::scalar_t<X>> P, Pattern V = dense>
[[nodiscard]] auto project(const P& projection, const X& from, const detail::call_execution& run = {}, const V& pattern = {}) {
    using T = detail::scalar_t<X>;
    const tensor_view<const T> x = from;
    tensor<T> out(detail::check_projected(projection, x));
    project(projection, x, out, run, pattern);
    return out;
}

} // namespace attn
