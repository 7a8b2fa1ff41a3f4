// What a projection of tokens along the sequence is, and one that has a gradient.
#pragma once

#include "../core/borrowed.hpp"
#include "../core/gradients.hpp"
#include "../core/output_memory.hpp"
#include "../kernel/gemm/matrix_product.hpp"
#include "../kernel/projection/token_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a projection is about to be used on; errors name the operation and the argument.
struct projection_context {
    std::string_view operation, argument;
    index_t heads, tokens, channels;

    /// Throws shape_error with a problem of the argument.
    [[noreturn]] void refuse(const auto&... problem) const { detail::raise(shape_error(operation, argument, problem...)); }
    /// Throws shape_error unless a parameter's heads are 1, shared by all, or as many as the tokens have.
    void require_heads(std::string_view parameter, const shape& s) const {
        if (s.heads != 1 && s.heads != heads) refuse(parameter, " has shape ", s, ", but there are ", heads, " heads of keys and values");
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
/// - `check_apart(out)`: throws, by out.require_apart, if an output overlaps what it refers to; nothing if it refers to nothing.
template <class P, class T>
concept Projection = Scalar<T> && requires(const P& p, const kernel::token_rows<T>& tokens, const row_block<T>& to, detail::scratch& memory,
                                           const projection_context& context, const output_memory& out, index_t i) {
    { p.size(i, i) } -> std::same_as<index_t>;
    { p.range(i, i, i) } -> std::same_as<kernel::token_range>;
    p.project(tokens, i, i, i, to, memory);
    { p.template workspace_bytes<T>(i, i) } -> std::same_as<std::size_t>;
    p.check(context);
    p.check_apart(out);
};

/// A projection whose rows are sums over the tokens that can be continued, part by part: sequence_parallel then hands these on from rank to
/// rank, where otherwise it brings together the tokens of a row's range. What a user's own adds to a Projection:
/// - `parts(head, m)`: how many parts the tokens 0 .. m - 1 are cut into, none of them empty.
/// - `part(head, number, m)`: the tokens of one. Each begins where the one before it ends.
/// - `project_parts(tokens, head, first, count, first_part, end_part, to, memory)`: of what `project` does, that which reads the parts
///   first_part .. end_part - 1, and no other token. The rows of `to` are as the parts before have left them, if there are any. All parts
///   in order, in however many calls, give the numbers of `project`.
template <class P, class T>
concept ResumableProjection = Projection<P, T> && requires(const P& p, const kernel::token_rows<T>& tokens, const row_block<T>& to,
                                                           detail::scratch& memory, index_t i) {
    { p.parts(i, i) } -> std::same_as<index_t>;
    { p.part(i, i, i) } -> std::same_as<kernel::token_range>;
    p.project_parts(tokens, i, i, i, i, i, to, memory);
};

/// A projection with a gradient, which projected attention needs to have one. What a user's own adds to the above:
/// - `gradients<T>`: a view, which may have no memory, for each parameter that has a gradient; no_gradients if none has.
/// - `add_token_gradients(tokens, head, first, count, d_out, to, memory)`: adds to the rows of `to`, of any strides, one for each token,
///   what the projected rows first .. first + count - 1, whose gradients are the rows of `d_out`, of contiguous channels, give to the
///   visible tokens.
/// - `backward_workspace_bytes<T>(m, channels)`: of `memory`, in one call of any of these.
/// And with parameters:
/// - `for_each_gradient(wanted, f)`: calls f("wanted.matrix", wanted.matrix, matrix) for each, gradient and parameter.
/// - `gradient_parts(m)`, `add_parameter_gradients(tokens, head, first, count, d_out, part, wanted, memory)`: the same for the gradients
///   that are wanted, whose channels are contiguous. They are cut into that many parts, no number is in two; this adds to one.
template <class P, class T>
concept DifferentiableProjection =
    Projection<P, T> && requires(const P& p, const kernel::token_rows<T>& tokens, const row_block<const T>& d_out, const row_block<T>& to,
                                 const typename P::template gradients<T>& wanted, detail::scratch& memory, index_t i) {
        p.add_token_gradients(tokens, i, i, i, d_out, to, memory);
        { p.template backward_workspace_bytes<T>(i, i) } -> std::same_as<std::size_t>;
        requires std::same_as<typename P::template gradients<T>, no_gradients> || requires {
            p.for_each_gradient(wanted, [](std::string_view, const tensor_view<T>&, const tensor_view<const T>&) {});
            { p.gradient_parts(i) } -> std::same_as<index_t>;
            p.add_parameter_gradients(tokens, i, i, i, d_out, i, wanted, memory);
        };
    };

namespace detail {

/// Whether a projection says what its gradients are; of which tokens, the concept asks.
template <class P>
concept HasProjectionGradients = requires { typename P::template gradients<float>; };

/// Calls check(name, view, shape) for each gradient. Throws attention_error where there is no such parameter, or channels do not lie side
/// by side.
template <Scalar T, class P, class G>
void check_projection_gradients(std::string_view operation, std::string_view member, const P& projection, const G& wanted,
                                const auto& check) {
    static_assert(DifferentiableProjection<P, T>, "attn: a projection has no gradient of such tokens (see attn::DifferentiableProjection)");
    for_each_gradient(projection, wanted, [&](std::string_view own, const tensor_view<T>& view, const tensor_view<const T>& parameter) {
        const nested_name argument(member, own);
        if (view.data() && !parameter.data())
            detail::raise(argument_error(operation, argument, "is asked for, but there is no such parameter"));
        check(argument, view, parameter.shape());
        if (view.data() && view.shape().channels > 1 && view.strides().channels != 1)
            detail::raise(shape_error(operation, argument, "of shape ", view.shape(), " needs contiguous channels"));
    });
}

/// The rows of a parameter (any, heads or 1, rows, columns) from one on, of a head; of none, none.
template <class T>
row_block<T> rows_of_head(const tensor_view<T>& parameter, index_t head, index_t first = 0, index_t plane = 0) {
    if (!parameter.data()) return {nullptr, 0, 0};
    return parameter.rows(plane, parameter.shape().heads == 1 ? 0 : head, first);
}

} // namespace detail

/// The shape of projected tokens: as many rows as the head with most has.
template <Scalar T, Projection<T> P>
shape projected_shape(const P& projection, const shape& tokens) {
    return {tokens.batch, tokens.heads, kernel::most_rows(projection, tokens), tokens.channels};
}

} // namespace attn
