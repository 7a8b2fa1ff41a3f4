// The gradient of projecting tokens along the sequence as an operation of its own.
#pragma once

#include "../kernel/projection/gradient.hpp"
#include "project.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what `project` read: the tokens x (batch, heads, m, d), and the parameters of the projection,
/// such as matrix and bias, in their shapes. What has no memory is not wanted, and not computed.
template <class P, Scalar T>
    requires detail::HasProjectionGradients<P>
struct project_gradients {
    tensor_view<T> x = {};
    typename P::template gradients<T> projection = {};
};

/// Bytes of workspace that the gradient of `project` needs for tokens of that shape with such an executor or execution.
template <Scalar T, DifferentiableProjection<T> P>
std::size_t backward_workspace_bytes(const P& projection, const shape& tokens, const detail::call_execution& run = {}) {
    detail::scratch slice;
    slice.take<bool>(tokens.tokens);
    slice.take<std::byte>(projection.template backward_workspace_bytes<T>(tokens.tokens, tokens.channels));
    return detail::bytes_for_threads(run.concurrency(), slice.used_bytes());
}

namespace detail {

template <Scalar T, DifferentiableProjection<T> P, Pattern V>
void check_project_backward(const P& projection, const tensor_view<const T>& x, const tensor_view<const T>& d_out,
                            const attn::project_gradients<P, T>& wanted, const V& pattern) {
    constexpr std::string_view name = "project";
    const auto& s = x.shape();
    const auto projected = check_projected(projection, x);
    check_view(name, "d_out", d_out);
    if (d_out.shape() != projected) refuse_result(name, "d_out", d_out.shape(), projected);
    check_rows(name, "d_out", d_out);
    const auto for_each = [&](const auto& visit) {
        visit("wanted.x", wanted.x, s, false);
        const auto check = [&](std::string_view argument, const tensor_view<T>& view, const shape& expected) {
            visit(argument, view, expected, false);
        };
        check_projection_gradients<T>(name, "projection", projection, wanted.projection, check);
    };
    check_gradients<T>(name, for_each, [&](const output_memory& memory) {
        memory.require_apart("x", x);
        memory.require_apart("d_out", d_out);
        projection.check_apart(memory);
        check_apart(pattern, memory);
    });
    attn::check(pattern, pattern_context{.operation = name, .batch = s.batch, .heads = s.heads, .end_query = 1, .end_key = s.tokens});
}

} // namespace detail

/// The gradient of `project`, from the tokens x that it read and the gradient of the loss by its result, `d_out` (batch, heads, p, d),
/// whose channels are contiguous. Of a learned matrix E and its bias, over the visible tokens j:
///     d x[b, h, j, c] = sum over rows r of E[h, r, j] d_out[b, h, r, c]
///     d E[h, r, j] = sum over b, c of d_out[b, h, r, c] x[b, h, j, c],      d bias[h, r] = sum over b, c of d_out[b, h, r, c]
/// and sums over the heads that share E or bias; for other projections, what each says of itself. A hidden token has the gradient 0, and a
/// row that reads no visible token gives none: it is 0 whatever the parameters are. Time: twice that of `project`. Gives the same bits for
/// every executor, number of threads and strides. `run` and `pattern` are those of `project`. Throws attention_error, before anything is
/// read or written: shapes or parameters that do not fit, a gradient that overlaps what is read or another gradient, a given workspace too
/// small.
template <TensorLike X, DifferentiableProjection<detail::scalar_t<X>> P, Pattern V = dense>
void backward(const P& projection, const X& from, const std::type_identity_t<tensor_view<const detail::scalar_t<X>>>& d_out,
              const std::type_identity_t<project_gradients<P, detail::scalar_t<X>>>& wanted, const detail::call_execution& run = {},
              const V& pattern = {}) {
    using T = detail::scalar_t<X>;
    const tensor_view<const T> x = from;
    const auto& s = x.shape();
    detail::check_project_backward(projection, x, d_out, wanted, pattern);
    const auto needed = backward_workspace_bytes<T>(projection, s, run);
    run.reserve("project", "the gradient for x", s, needed);
    const detail::slices slices(run.workspace().bytes().data(), needed / static_cast<std::size_t>(run.concurrency()));

    // Calls f(tokens, head, row, count, d_out, memory) for the runs of the rows of one head of one batch entry that read a visible token.
    const auto for_each_run = [&](index_t number, index_t slice, const auto& f) {
        const auto batch = number / s.heads, head = number % s.heads;
        auto memory = slices[slice];
        bool* const seen = memory.take<bool>(s.tokens);
        const auto tokens = detail::visible_tokens<T>(x, pattern, batch, head, seen);
        const auto given = d_out.rows(batch, head);
        const auto of_run = [&](index_t row, index_t count, bool has_tokens) {
            auto own = memory;
            if (has_tokens) f(tokens, head, row, count, row_block<const T>{given.data + row * given.row_stride, given.row_stride, 1}, own);
        };
        detail::for_each_projected_run(projection, tokens, head, 0, d_out.shape().tokens, of_run);
    };
    const auto heads = s.batch * s.heads;
    run.for_each(wanted.x.data() ? heads : 0, [&](index_t number, index_t slice) {
        const auto own = wanted.x.slice({.batch = {number / s.heads, 1}, .heads = {number % s.heads, 1}});
        kernel::find_token_gradients<T>(projection, own, [&](const auto& f) { for_each_run(number, slice, f); });
    });
    // A sum has one order: batch entries, then the heads that share a parameter.
    if (!kernel::any_parameter_wanted<T>(projection, wanted.projection)) return;
    kernel::clear_parameter_gradients<T>(projection, wanted.projection);
    run.for_each(kernel::parameter_gradient_parts(projection, wanted.projection, s.tokens), [&](index_t part, index_t slice) {
        for (index_t number = 0; number < heads; ++number)
            kernel::add_parameter_gradients<T>(projection, part, wanted.projection, [&](const auto& f) { for_each_run(number, slice, f); });
    });
}

} // namespace attn
