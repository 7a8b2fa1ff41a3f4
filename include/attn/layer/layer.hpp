// What a layer is, and the front door through which all of them are called.
#pragma once

#include "../core/inputs.hpp"
#include "../kernel/tile_loader.hpp"
#include "../norm/norm.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a layer reads in one call. Tokens are rows of channels, (batch, 1, n, channels), their channels side by side.
template <Scalar T>
struct layer_inputs {
    tensor_view<const T> tokens;
    tensor_view<const T> residual = {}; ///< is added to the result, of whose shape it is
    tensor_view<const T> context = {};  ///< (batch, 1, m, channels): where attention takes keys and values from, if not from the tokens; no
                                        ///< tokens are a context too
    tensor_view<const T> value_context = {}; ///< (batch, 1, m, channels): where it takes values from, if not from the context
    attn::positions positions = {};          ///< where queries and keys lie: see `positions`
};

/// A const value that maps token rows to token rows. It refers to its weights, as an operator does; their owner (see `parameters`) keeps
/// them.
/// - `scalar`, `name`: what it computes in, and what errors call it.
/// - `check(in)`: throws attention_error if shapes, positions or weights do not fit. Reads no element.
/// - `check_apart(out)`: throws, by out.require_apart, if an output overlaps what the layer refers to; nothing if it refers to nothing.
/// - `output_shape(tokens)`: of the result.
/// - `workspace_bytes(tokens, context, concurrency)`: the scratch memory that `forward` needs for such shapes.
/// - `forward(in, out, run)`: out = layer(in.tokens) + in.residual. Everything has been checked; it allocates nothing and writes only to
///   `out`, which may be the residual itself, and the tokens too where `in_place` says so.
/// - `moves_statistics`: whether `forward` is a step of training that moves statistics, as of a norm.
/// A layer that cannot add a residual, or knows no context, refuses it in `check`.
template <class L>
concept Layer = requires(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out,
                         const shape& s, const output_memory& memory, const execution& run) {
    requires Scalar<typename L::scalar>;
    { L::name } -> std::convertible_to<std::string_view>;
    { L::in_place } -> std::convertible_to<bool>;
    { L::moves_statistics } -> std::convertible_to<bool>;
    layer.check(in);
    layer.check_apart(memory);
    { layer.output_shape(s) } -> std::same_as<shape>;
    { layer.workspace_bytes(s, s, index_t{1}) } -> std::same_as<std::size_t>;
    layer.forward(in, out, run);
};

namespace detail {

/// Throws shape_error unless these are rows (batch, 1, n, channels).
template <class T>
void check_tokens(std::string_view operation, std::string_view argument, const tensor_view<T>& rows, index_t channels) {
    check_rows(operation, argument, rows);
    const auto& s = rows.shape();
    if (s.heads != 1 || s.channels != channels)
        detail::raise(shape_error(operation, argument, "has shape ", s, ", but (batch, 1, tokens, ", channels, ") is needed"));
}

/// Throws argument_error if a layer of the tokens alone is given a context.
template <class T>
void check_no_context(std::string_view operation, const layer_inputs<T>& in, std::string_view problem = "is given, but not used here") {
    if (is_given(in.context) || is_given(in.value_context)) detail::raise(argument_error(operation, "context", problem));
}

/// A view that says where memory will be: for checks, which read no element.
template <class T>
tensor_view<const T> planned(const tensor_view<T>& view) {
    static constexpr T somewhere{};
    return {&somewhere, view.shape(), view.strides()};
}

/// Calls f(row, batch, token) for each row of a tensor (batch, 1, n, channels), in parallel.
template <class T, class F>
void for_each_row(const tensor_view<T>& rows, const execution& run, const F& f) {
    constexpr index_t bytes_of_a_task = 64 * 1024;
    const auto tokens = rows.shape().tokens, channels = rows.shape().channels, count = rows.shape().batch * tokens;
    const auto rows_of_a_task = std::max<index_t>(1, bytes_of_a_task / (std::max<index_t>(1, channels) * static_cast<index_t>(sizeof(T))));
    run.for_each((count + rows_of_a_task - 1) / rows_of_a_task, [&](index_t task, index_t) {
        for (auto r = task * rows_of_a_task; r < std::min(count, (task + 1) * rows_of_a_task); ++r) {
            const auto b = r / tokens, i = r % tokens;
            f(rows.row(b, 0, i), b, i);
        }
    });
}

/// sum = a + b, for rows of so many channels; it may be one of them.
template <Scalar T>
void add_rows(const T* a, const T* b, T* sum, index_t channels) {
    using lanes = simd::lanes<T>;
    index_t c = 0;
    for (; c + lanes::size <= channels; c += lanes::size) (lanes::load(a + c) + lanes::load(b + c)).store(sum + c);
    for (; c < channels; ++c) sum[c] = a[c] + b[c];
}

/// How many matrices the rows of tensors (batch, 1, n, channels) are, and how many rows each has: one of all rows if they are equally far
/// apart in every tensor, else one of each batch entry. A tensor without memory does not count.
struct row_matrices {
    index_t count, rows;

    template <class... Views>
    explicit row_matrices(const shape& s, const Views&... tensors) : count(s.batch), rows(s.tokens) {
        const auto even = [&](const auto& t) { return !t.data() || t.strides().batch == s.tokens * t.strides().tokens; };
        if (s.batch < 2 || !(even(tensors) && ...)) return;
        rows = s.batch * s.tokens;
        count = 1;
    }
};

/// Throws attention_error unless `out` has that shape and can be written while the inputs are read.
template <Layer L>
void check_layer_output(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out,
                        const shape& expected) {
    using T = typename L::scalar;
    check_rows(L::name, "out", out);
    if (out.shape() != expected) refuse_result(L::name, "out", out.shape(), expected);
    check_writable(L::name, "out", out);
    const auto apart = [&](std::string_view name, const tensor_view<const T>& input, bool may_be_out) {
        if (may_be_out && out.data() == input.data() && out.strides() == input.strides() && out.shape() == input.shape()) return;
        if (overlap(out, input)) detail::raise(shape_error(L::name, "out", "of shape ", out.shape(), " overlaps ", name));
    };
    const output_memory memory(L::name, "out", out);
    layer.check_apart(memory);
    memory.require_apart("positions.first_query", in.positions.first_query);
    memory.require_apart("positions.first_key", in.positions.first_key);
    apart("tokens", in.tokens, L::in_place);
    apart("context", in.context, false);
    apart("value_context", in.value_context, false);
    if (is_given(in.residual)) {
        check_rows(L::name, "residual", in.residual);
        if (in.residual.shape() != expected) refuse_result(L::name, "residual", in.residual.shape(), expected);
        apart("residual", in.residual, true);
    }
}
/// Throws attention_error unless the layer can be run.
template <Layer L>
void check_forward(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out) {
    layer.check(in);
    const auto expected = layer.output_shape(in.tokens.shape());
    check_shape<typename L::scalar>(L::name, "the result", expected);
    check_layer_output(layer, in, out, expected);
}
/// Sees to the workspace of a forward.
template <Layer L>
void reserve_forward(const L& layer, const layer_inputs<typename L::scalar>& in, const execution& run) {
    run.reserve(L::name, "tokens", in.tokens.shape(), layer.workspace_bytes(in.tokens.shape(), in.context.shape(), run.concurrency()));
}

} // namespace detail

/// Bytes of workspace that such a call of a layer needs with such an executor or execution. Throws attention_error if the call is refused.
template <Layer L>
std::size_t workspace_bytes(const L& layer, const layer_inputs<typename L::scalar>& in, const detail::call_execution& run = {}) {
    layer.check(in);
    return layer.workspace_bytes(in.tokens.shape(), in.context.shape(), run.concurrency());
}

/// Runs a layer: out = layer(in), and its residual. Checks everything once, then computes; `run` as in `attend`.
/// The result is the same, bit by bit, for every executor, number of threads, strides and other batch entries. Throws attention_error,
/// before anything is read or written, naming layer, argument and shapes.
template <Layer L>
void forward(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out,
             const detail::call_execution& run = {}) {
    detail::check_forward(layer, in, out);
    detail::reserve_forward(layer, in, run);
    layer.forward(in, out, run);
}

/// Runs a layer, to a new tensor: see forward(layer, in, out, run).
template <Layer L>
[[nodiscard]] tensor<typename L::scalar> forward(const L& layer, const layer_inputs<typename L::scalar>& in,
                                                 const detail::call_execution& run = {}) {
    layer.check(in);
    tensor<typename L::scalar> out(layer.output_shape(in.tokens.shape()));
    forward(layer, in, out.view(), run);
    return out;
}

} // namespace attn
