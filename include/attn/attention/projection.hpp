// Projections of tokens along the sequence, m to fewer: the identity, and learned matrices.
#pragma once

#include "projection_concept.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// No projection: every token as it is. With it, projected attention is attention.
struct identity_projection {
    index_t size(index_t, index_t tokens) const { return tokens; }
    kernel::token_range range(index_t, index_t row, index_t) const { return {row, row + 1}; }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context&) const {}
    void check_apart(const output_memory&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const row_block<T>& to, detail::scratch&) const {
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) to.data[r * to.row_stride + c] = x(first + r, c);
    }

    template <Scalar>
    using gradients = no_gradients;
    template <Scalar T>
    std::size_t backward_workspace_bytes(index_t, index_t) const {
        return 0;
    }
    template <Scalar T>
    void add_token_gradients(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch&) const {
        for (index_t r = 0; r < count; ++r) kernel::add_channels(to.address(first + r), to.channel_stride, x.channels, d_out.address(r));
    }
};

/// A learned matrix: projected[r] = sum_j matrix[r, j] x[j] + bias[r] over the visible tokens j. Of a sequence shorter than the matrix is
/// wide, the first columns are used. Views, of memory that many operators may share: heads 1 is one projection for all heads.
template <Scalar T>
struct linear_projection {
    tensor_view<const T> matrix;    ///< (1, heads or 1, projected, most tokens)
    tensor_view<const T> bias = {}; ///< (1, heads or 1, projected, 1), or none

    index_t size(index_t, index_t) const { return matrix.shape().tokens; }
    kernel::token_range range(index_t, index_t, index_t tokens) const { return {0, tokens}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t tokens, index_t channels) const {
        return product(size(0, tokens), tokens, channels).task_bytes();
    }
    void check(const projection_context& context) const {
        detail::check_view(context.operation, context.argument, matrix);
        detail::check_view(context.operation, context.argument, bias);
        context.require_heads("matrix", matrix.shape());
        if (matrix.shape().channels < context.tokens)
            context.refuse("matrix has shape ", matrix.shape(), ", made for fewer than ", context.tokens, " tokens");
        if (!bias.data()) return;
        context.require_heads("bias", bias.shape());
        if (bias.shape().tokens != matrix.shape().tokens || bias.shape().channels != 1)
            context.refuse("bias has shape ", bias.shape(), ", but matrix has ", matrix.shape());
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("the matrix of a projection", matrix);
        out.require_apart("the bias of a projection", bias);
    }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch& memory) const {
        project_parts(x, head, first, count, 0, parts(head, x.count), to, memory);
    }

    /// Parts are those of the sum of a product: it is a chain of multiply-adds over each.
    index_t parts(index_t, index_t tokens) const { return product::depth_pieces(tokens); }
    kernel::token_range part(index_t, index_t number, index_t tokens) const {
        const auto some = product::depth_piece(tokens, number);
        return {some.first, some.first + some.count};
    }
    void project_parts(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, index_t first_part, index_t end_part,
                       const row_block<T>& to, detail::scratch& memory) const {
        row_block<const T> start{to.data, to.row_stride, 1};
        if (first_part == 0) start = detail::rows_of_head(bias, head, first), start.channel_stride = 0;
        product(count, x.count, x.channels)
            .run_all(
                memory, detail::rows_of_head(matrix, head, first), x.rows, start, to,
                [&](index_t from, index_t terms, auto&& visit) { x.for_each_run(from, from + terms, visit); },
                typename product::extent{first_part, end_part - first_part});
    }

    /// The gradients of the matrix and the bias, in their shapes.
    template <Scalar U>
    struct gradients {
        tensor_view<U> matrix = {}; ///< of the matrix
        tensor_view<U> bias = {};   ///< of the bias
    };
    void for_each_gradient(const gradients<T>& wanted, const auto& f) const {
        f("wanted.matrix", wanted.matrix, matrix);
        f("wanted.bias", wanted.bias, bias);
    }
    template <Scalar>
    std::size_t backward_workspace_bytes(index_t tokens, index_t channels) const {
        const auto rows = size(0, tokens);
        detail::scratch memory;
        memory.take<T>(tokens_of_part, channels);
        return memory.used_bytes() +
               std::max(product(tokens_of_part, rows, channels).task_bytes(), product(rows, channels, tokens_of_part).task_bytes());
    }
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch& memory) const {
        T* const sums = memory.take<T>(tokens_of_part, x.channels);
        for (index_t part = 0; part < gradient_parts(x.count); ++part)
            for_each_run_of_part(x, part, [&](index_t token, index_t tokens) {
                auto weights = detail::rows_of_head(matrix, head, first);
                weights.data += token * weights.channel_stride;
                product(tokens, count, x.channels).run_all(memory, weights.transposed(), d_out, {nullptr, 0, 1}, {sums, x.channels, 1});
                for (index_t j = 0; j < tokens; ++j)
                    kernel::add_channels(to.address(token + j), to.channel_stride, x.channels, sums + j * x.channels);
            });
    }
    /// How many parts the matrix's gradient has: each is some of its columns, of tokens side by side.
    index_t gradient_parts(index_t tokens) const { return std::max<index_t>(1, (tokens + tokens_of_part - 1) / tokens_of_part); }
    void add_parameter_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count,
                                 const row_block<const T>& d_out, index_t part, const gradients<T>& wanted, detail::scratch& memory) const {
        if (wanted.matrix.data())
            for_each_run_of_part(x, part, [&](index_t token, index_t tokens) {
                auto sums = detail::rows_of_head(wanted.matrix, head, first);
                sums.data += token;
                product(count, x.channels, tokens)
                    .run_all(memory, d_out, x.rows.from(token).transposed(), {sums.data, sums.row_stride, 1},
                             {sums.data, sums.row_stride, 1});
            });
        const auto of_bias = detail::rows_of_head(wanted.bias, head, first);
        for (index_t r = 0; part == 0 && of_bias.data && r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) of_bias.data[r * of_bias.row_stride] += d_out.data[r * d_out.row_stride + c];
    }

private:
    using product = kernel::matrix_product<T>;
    static constexpr index_t tokens_of_part = 128;

    static void for_each_run_of_part(const kernel::token_rows<T>& x, index_t part, const auto& f) {
        x.for_each_run(part * tokens_of_part, std::min(x.count, (part + 1) * tokens_of_part), f);
    }
};

/// Deduces a linear_projection of its matrix's scalar type.
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
            context.refuse("has ", each.size(), " projections, but there are ", context.heads, " heads of keys and values");
        for (const auto& p : each) p.check(context);
    }
    void check_apart(const output_memory& out) const {
        for (const auto& p : each) p.check_apart(out);
    }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch& memory) const {
        of(head).project(x, head, first, count, to, memory);
    }

    index_t parts(index_t head, index_t tokens) const
        requires requires(const P& p) { p.parts(head, tokens); }
    {
        return of(head).parts(head, tokens);
    }
    kernel::token_range part(index_t head, index_t number, index_t tokens) const { return of(head).part(head, number, tokens); }
    template <Scalar T>
        requires ResumableProjection<P, T>
    void project_parts(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, index_t first_part, index_t end_part,
                       const row_block<T>& to, detail::scratch& memory) const {
        of(head).project_parts(x, head, first, count, first_part, end_part, to, memory);
    }

    /// The gradients of each head's projection, or none.
    template <Scalar T>
        requires requires { typename P::template gradients<T>; }
    struct gradients {
        std::span<const typename P::template gradients<T>> each = {}; ///< of each head's projection
    };
    template <Scalar T>
    void for_each_gradient(const gradients<T>& wanted, const auto& f) const {
        if (wanted.each.empty()) return;
        if (wanted.each.size() != each.size())
            detail::raise(shape_error("projection_per_head", "wanted.each", "has ", wanted.each.size(), " entries, but there are ",
                                      each.size(), " projections"));
        if constexpr (!std::same_as<typename P::template gradients<T>, no_gradients>)
            for (std::size_t h = 0; h < each.size(); ++h) each[h].for_each_gradient(wanted.each[h], f);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(index_t tokens, index_t channels) const {
        std::size_t largest = 0;
        for (const auto& p : each) largest = std::max(largest, p.template backward_workspace_bytes<T>(tokens, channels));
        return largest;
    }
    template <Scalar T>
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch& memory) const {
        of(head).add_token_gradients(x, head, first, count, d_out, to, memory);
    }
    index_t gradient_parts(index_t tokens) const {
        index_t most = 0;
        if constexpr (requires(const P& p) { p.gradient_parts(tokens); })
            for (const auto& p : each) most = std::max(most, p.gradient_parts(tokens));
        return most;
    }
    template <Scalar T>
    void add_parameter_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count,
                                 const row_block<const T>& d_out, index_t part, const gradients<T>& wanted, detail::scratch& memory) const {
        if constexpr (!std::same_as<typename P::template gradients<T>, no_gradients>)
            if (!wanted.each.empty() && part < of(head).gradient_parts(x.count))
                of(head).add_parameter_gradients(x, head, first, count, d_out, part, wanted.each[static_cast<std::size_t>(head)], memory);
    }

private:
    const P& of(index_t head) const {
        if (head >= std::ssize(each)) [[unlikely]] // sizes are asked for before anything is checked
            detail::raise(shape_error("projection_per_head", "each", "has ", each.size(), " projections, none for head ", head));
        return each[static_cast<std::size_t>(head)];
    }
};

} // namespace attn
