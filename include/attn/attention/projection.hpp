// Projections of tokens along the sequence, m to fewer: what one is, the identity, and learned matrices.
#pragma once

#include "../core/borrowed.hpp"
#include "../core/output_memory.hpp"
#include "../kernel/gemm/matrix_product.hpp"
#include "../kernel/projection/token_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a projection is about to be used on; errors name the operation and the argument.
struct projection_context {
    std::string_view operation, argument;
    index_t heads, tokens, channels;

    /// Throws shape_error.
    [[noreturn]] void refuse(const std::string& problem) const { throw shape_error(operation, argument, problem); }
    /// Throws shape_error unless a parameter's heads are 1, shared by all, or as many as the tokens have.
    void require_heads(std::string_view parameter, const shape& s) const {
        if (s.heads != 1 && s.heads != heads)
            refuse(std::string(parameter) + " has shape " + to_string(s) + ", but there are " + std::to_string(heads) +
                   " heads of keys and values");
    }
};

/// Turns the m tokens of each batch entry and head, rows of channels, into fewer rows of as many channels. What a user's own needs:
/// - `size(head, m)`: how many rows there will be.
/// - `range(head, row, m)`: the tokens first .. end - 1 that a projected row may read. A row none of whose tokens is visible is left out.
/// - `project(tokens, head, first, count, to, memory)`: writes the projected rows first .. first + count - 1 to the rows of `to`, of
///   contiguous channels. It reads visible tokens only; each of those rows has one. Allocates nothing: `memory` is scratch of
///   workspace_bytes.
/// - `workspace_bytes<T>(m, channels)`: of one call of `project`, whatever the number of rows.
/// - `check(context)`: throws, by context.refuse, if the parameters do not fit.
/// Optional: `check_apart(out)`, if it refers to memory: see output_memory.
template <class P, class T>
concept Projection = Scalar<T> && requires(const P& p, const kernel::token_rows<T>& tokens, const kernel::row_block<T>& to,
                                           detail::scratch& memory, const projection_context& context, index_t i) {
    { p.size(i, i) } -> std::same_as<index_t>;
    { p.range(i, i, i) } -> std::same_as<kernel::token_range>;
    p.project(tokens, i, i, i, to, memory);
    { p.template workspace_bytes<T>(i, i) } -> std::same_as<std::size_t>;
    p.check(context);
};

/// No projection: every token as it is. With it, projected attention is attention.
struct identity_projection {
    index_t size(index_t, index_t tokens) const { return tokens; }
    kernel::token_range range(index_t, index_t row, index_t) const { return {row, row + 1}; }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const kernel::row_block<T>& to, detail::scratch&) const {
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) to.data[r * to.row_stride + c] = x(first + r, c);
    }
};

/// A learned matrix: projected[r] = sum_j matrix[r, j] x[j] + bias[r] over the visible tokens j. Of a sequence shorter than the matrix is
/// wide, the first columns are used. Views, of memory that many operators may share: heads 1 is one projection for all heads.
template <Scalar T, class Arch = simd::native>
struct linear_projection {
    tensor_view<const T> matrix;    ///< (1, heads or 1, projected, most tokens)
    tensor_view<const T> bias = {}; ///< (1, heads or 1, projected, 1), or none

    index_t size(index_t, index_t) const { return matrix.shape().tokens; }
    kernel::token_range range(index_t, index_t, index_t tokens) const { return {0, tokens}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t tokens, index_t channels) const {
        return kernel::matrix_product<T, Arch>(size(0, tokens), tokens, channels).task_bytes();
    }
    void check(const projection_context& context) const {
        detail::check_view(context.operation, context.argument, matrix);
        detail::check_view(context.operation, context.argument, bias);
        context.require_heads("matrix", matrix.shape());
        if (matrix.shape().channels < context.tokens)
            context.refuse("matrix has shape " + to_string(matrix.shape()) + ", made for fewer than " + std::to_string(context.tokens) +
                           " tokens");
        if (!bias.data()) return;
        context.require_heads("bias", bias.shape());
        if (bias.shape().tokens != matrix.shape().tokens || bias.shape().channels != 1)
            context.refuse("bias has shape " + to_string(bias.shape()) + ", but matrix has " + to_string(matrix.shape()));
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("the matrix of a projection", matrix);
        out.require_apart("the bias of a projection", bias);
    }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch& memory) const {
        const auto at = [head, first](const tensor_view<const T>& t) {
            return t.data() ? t.row(0, t.shape().heads == 1 ? 0 : head, first) : nullptr;
        };
        const kernel::matrix_product<T, Arch> product(count, x.count, x.channels);
        for (index_t task = 0; task < product.task_count(); ++task) {
            auto own = memory;
            product.run_task(task, own, {at(matrix), matrix.strides().tokens, matrix.strides().channels}, x.rows,
                             {at(bias), bias.strides().tokens, 0}, to,
                             [&](index_t from, index_t terms, auto&& emit) { x.for_each_run(from, from + terms, emit); });
        }
    }
};

/// Of its matrix's scalar type.
template <TensorLike W, class... Others>
linear_projection(const W&, const Others&...) -> linear_projection<detail::scalar_t<W>>;

/// A projection of its own for each head, whose sizes may differ: each[head]. The caller's memory.
template <class P>
struct projection_per_head {
    borrowed<const P> each;

    index_t size(index_t head, index_t tokens) const { return of(head).size(head, tokens); }
    kernel::token_range range(index_t head, index_t row, index_t tokens) const { return of(head).range(head, row, tokens); }
    template <Scalar T>
    std::size_t workspace_bytes(index_t tokens, index_t channels) const {
        std::size_t largest = 0;
        for (const auto& p : each) largest = std::max(largest, p.template workspace_bytes<T>(tokens, channels));
        return largest;
    }
    void check(const projection_context& context) const {
        if (std::ssize(each) != context.heads)
            context.refuse("has " + std::to_string(each.size()) + " projections, but there are " + std::to_string(context.heads) +
                           " heads of keys and values");
        for (const auto& p : each) p.check(context);
    }
    void check_apart(const output_memory& out) const {
        for (const auto& p : each) attn::check_apart(p, out);
    }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch& memory) const {
        of(head).project(x, head, first, count, to, memory);
    }

private:
    const P& of(index_t head) const {
        if (head >= std::ssize(each)) [[unlikely]] // sizes are asked for before anything is checked
            throw shape_error("projection_per_head", "each", "has " + std::to_string(each.size()) + " projections, none for head " + std::to_string(head));
        return each[static_cast<std::size_t>(head)];
    }
};

/// The shape of projected tokens: as many rows as the head with most has.
template <Scalar T, Projection<T> P>
shape projected_shape(const P& projection, const shape& tokens) {
    auto s = tokens;
    s.tokens = 0;
    for (index_t h = 0; h < tokens.heads; ++h) s.tokens = std::max(s.tokens, projection.size(h, tokens.tokens));
    return s;
}

namespace detail {

/// A head's projected rows are made by so many at a time, each of which reads all of its tokens.
inline constexpr index_t projected_rows_of_task = 384;

} // namespace detail

} // namespace attn
