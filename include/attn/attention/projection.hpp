// Projections of tokens along the sequence: m tokens become fewer.
#pragma once

#include "../kernel/gemm/matrix_product.hpp"
#include "../kernel/projection/token_rows.hpp"
#include "../pattern/schedule.hpp"
#include "attention.hpp"

#include <optional>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a projection is about to be used on; errors name the operation and the argument.
struct projection_context {
    std::string_view operation, argument;
    index heads, tokens, channels;

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
                                           detail::scratch& memory, const projection_context& context, index i) {
    { p.size(i, i) } -> std::same_as<index>;
    { p.range(i, i, i) } -> std::same_as<kernel::token_range>;
    p.project(tokens, i, i, i, to, memory);
    { p.template workspace_bytes<T>(i, i) } -> std::same_as<std::size_t>;
    p.check(context);
};

/// No projection: every token as it is. With it, projected attention is attention.
struct identity_projection {
    index size(index, index tokens) const { return tokens; }
    kernel::token_range range(index, index row, index) const { return {row, row + 1}; }
    template <Scalar T>
    std::size_t workspace_bytes(index, index) const {
        return 0;
    }
    void check(const projection_context&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index, index first, index count, const kernel::row_block<T>& to, detail::scratch&) const {
        for (index r = 0; r < count; ++r)
            for (index c = 0; c < x.channels; ++c) to.data[r * to.row_stride + c] = x(first + r, c);
    }
};

/// A learned matrix: projected[r] = sum_j matrix[r, j] x[j] + bias[r] over the visible tokens j. Of a sequence shorter than the matrix is
/// wide, the first columns are used. Views, of memory that many operators may share: heads 1 is one projection for all heads.
template <Scalar T, class Arch = simd::native>
struct linear_projection {
    tensor_view<const T> matrix;    ///< (1, heads or 1, projected, most tokens)
    tensor_view<const T> bias = {}; ///< (1, heads or 1, projected, 1), or none

    index size(index, index) const { return matrix.shape().tokens; }
    kernel::token_range range(index, index, index tokens) const { return {0, tokens}; }
    template <Scalar>
    std::size_t workspace_bytes(index tokens, index channels) const {
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
    void project(const kernel::token_rows<T>& x, index head, index first, index count, const kernel::row_block<T>& to,
                 detail::scratch& memory) const {
        const auto at = [head, first](const tensor_view<const T>& t) {
            return t.data() ? t.row(0, t.shape().heads == 1 ? 0 : head, first) : nullptr;
        };
        const kernel::matrix_product<T, Arch> product(count, x.count, x.channels);
        for (index task = 0; task < product.task_count(); ++task) {
            auto own = memory;
            product.run_task(task, own, {at(matrix), matrix.strides().token, matrix.strides().channel}, x.rows,
                             {at(bias), bias.strides().token, 0}, to,
                             [&](index from, index terms, auto&& emit) { x.for_each_run(from, from + terms, emit); });
        }
    }
};

/// A projection of its own for each head, whose sizes may differ: each[head]. The caller's memory.
template <class P>
struct projection_per_head {
    borrowed<const P> each;

    index size(index head, index tokens) const { return of(head).size(head, tokens); }
    kernel::token_range range(index head, index row, index tokens) const { return of(head).range(head, row, tokens); }
    template <Scalar T>
    std::size_t workspace_bytes(index tokens, index channels) const {
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
    void project(const kernel::token_rows<T>& x, index head, index first, index count, const kernel::row_block<T>& to,
                 detail::scratch& memory) const {
        of(head).project(x, head, first, count, to, memory);
    }

private:
    const P& of(index head) const {
        if (head >= std::ssize(each)) [[unlikely]] // sizes are asked for before anything is checked
            throw shape_error("projection_per_head", "each", "has " + std::to_string(each.size()) + " projections, none for head " + std::to_string(head));
        return each[static_cast<std::size_t>(head)];
    }
};

/// Fills a matrix (1, heads, projected, m) with the random projection by which the paper proves that few rows suffice: independent
/// N(0, 1 / projected), so that E^T E is the identity on average. The same numbers for a seed in every run; the distribution is
/// computed here, for the standard library's may differ. Throws shape_error if the matrix cannot be written.
template <Scalar T>
void fill_random_projection(const tensor_view<T>& matrix, std::uint64_t seed) {
    const auto& s = matrix.shape();
    detail::check_view("fill_random_projection", "matrix", matrix);
    if (overlaps_itself(matrix))
        throw shape_error("fill_random_projection", "matrix", "of shape " + to_string(s) + " has strides by which its elements overlap");
    const auto next = [&seed] { // splitmix64, to a number in (0, 1]
        auto x = seed += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return static_cast<double>((x ^ x >> 31) >> 11) * 0x1p-53 + 0x1p-54;
    };
    for (index b = 0; b < s.batch; ++b)
        for (index h = 0; h < s.heads; ++h)
            for (index r = 0; r < s.tokens; ++r)
                for (index j = 0; j < s.channels; ++j) {
                    const auto radius = std::sqrt(-2 * std::log(next()) / static_cast<double>(s.tokens));
                    matrix(b, h, r, j) = static_cast<T>(radius * std::cos(2 * std::numbers::pi * next()));
                }
}

namespace detail {

/// seen[j]: whether the pattern shows token first_token + j to all of the queries.
inline void find_visible(const Pattern auto& pattern, const query_tile& queries, index first_token, index tokens, bool* seen) {
    std::fill_n(seen, tokens, false);
    for_each_run(pattern, queries, first_token, tokens, 1,
                 [&](const key_run& r) { std::fill_n(seen + (r.first - first_token), r.count, r.full); });
}

inline constexpr index projected_rows_of_task = 384;

} // namespace detail

/// The shape of projected tokens: as many rows as the head with most has.
template <Scalar T, Projection<T> P>
shape projected_shape(const P& projection, const shape& tokens) {
    auto s = tokens;
    s.tokens = 0;
    for (index h = 0; h < tokens.heads; ++h) s.tokens = std::max(s.tokens, projection.size(h, tokens.tokens));
    return s;
}

/// Bytes of workspace that `project` needs.
template <Scalar T, Projection<T> P>
std::size_t project_workspace_bytes(const P& projection, const shape& tokens, index concurrency) {
    detail::scratch memory;
    for (index slice = 0; slice < concurrency; ++slice) {
        memory.take<bool>(tokens.tokens);
        memory.take<std::byte>(projection.template workspace_bytes<T>(tokens.tokens, tokens.channels));
    }
    return memory.used_bytes();
}

/// Projects the tokens x (batch, heads, m, d) to out (batch, heads, p, d), whose channels are contiguous: an operation of its own, as
/// before the linear layers of keys and values. The pattern says which tokens exist, as query 0 sees them; a row that reads none of them is
/// zero, and so are rows that a head lacks. Throws shape_error, before anything is read or written, if shapes, parameters or the workspace
/// do not fit.
template <Scalar T, Projection<T> P, Pattern V = dense>
void project(const P& projection, const tensor_view<const T>& x, const tensor_view<T>& out, const execution& run, const V& pattern = {}) {
    constexpr std::string_view name = "project";
    const auto& s = x.shape();
    detail::check_view(name, "x", x);
    projection.check(projection_context{name, "projection", s.heads, s.tokens, s.channels});
    const auto expected = projected_shape<T>(projection, s);
    detail::check_shape<T>(name, "projection", expected);
    detail::check_output(name, "out", out, expected, inputs<T>{x, x, x});
    const output_memory memory_of_out(name, "out", out);
    check_apart(projection, memory_of_out);
    check_apart(pattern, memory_of_out);
    if (out.strides().channel != 1 && out.shape().channels > 1)
        throw shape_error(name, "out", "of shape " + to_string(out.shape()) + " needs contiguous channels");
    attn::check(pattern, pattern_context{.operation = name, .batch = s.batch, .heads = s.heads, .end_query = 1, .end_key = s.tokens});
    const auto needed = project_workspace_bytes<T>(projection, s, run.concurrency());
    if (run.workspace().size_bytes() < needed)
        throw shape_error(name, "workspace",
                          "has " + std::to_string(run.workspace().size_bytes()) + " bytes, but " + std::to_string(needed) + " are needed");

    const auto max_rows = out.shape().tokens, blocks = (max_rows + detail::projected_rows_of_task - 1) / detail::projected_rows_of_task;
    run.for_each(s.batch * s.heads * blocks, [&](index task, index slice) {
        const auto batch = task / blocks / s.heads, head = task / blocks % s.heads, first = task % blocks * detail::projected_rows_of_task;
        detail::scratch memory(run.workspace().bytes().data() +
                               needed / static_cast<std::size_t>(run.concurrency()) * static_cast<std::size_t>(slice));
        bool* const seen = memory.take<bool>(s.tokens);
        kernel::token_rows<T> tokens{kernel::rows_of(x, batch, head), s.tokens, s.channels};
        if constexpr (!std::same_as<V, dense>) {
            detail::find_visible(at(pattern, batch, head), {0, 1, 1}, 0, s.tokens, seen);
            tokens.seen = seen;
        }
        const auto size = projection.size(head, s.tokens);
        const auto present = [&](index row) { return row < size && tokens.any_visible(projection.range(head, row, s.tokens)); };
        const auto to = kernel::rows_of(out, batch, head);
        const auto end = std::min(max_rows, first + detail::projected_rows_of_task);
        for (auto row = first; row < end;) {
            const bool has_tokens = present(row);
            auto next = row + 1;
            while (next < end && present(next) == has_tokens) ++next;
            auto own = memory;
            const kernel::row_block<T> rows{to.data + row * to.row_stride, to.row_stride, 1};
            if (has_tokens)
                projection.project(tokens, head, row, next - row, rows, own);
            else
                for (index r = 0; r < next - row; ++r) std::fill_n(rows.data + r * rows.row_stride, s.channels, T{0});
            row = next;
        }
    });
}

} // namespace attn
