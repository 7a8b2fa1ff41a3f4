// Training of layers: a forward that keeps what the gradient needs, and the gradient.
#pragma once

#include "../norm/backward.hpp"
#include "layer.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a layer read in a call, in the same shapes, and to its parameters, named like them. What
/// has no memory is not wanted. That of a residual is the gradient given.
template <class L>
struct layer_gradients {
    tensor_view<typename L::scalar> tokens = {};
    tensor_view<typename L::scalar> context = {};
    tensor_view<typename L::scalar> value_context = {};
    typename L::gradients parameters = {};
};

/// A layer with a gradient.
/// - `gradients`: views, a member for each parameter that has a gradient, named like it.
/// - `for_each_gradient(in, wanted, visit)`: calls visit(name, view, shape, rows) for each of them, with the shape that it must have, and
///   whether its channels must lie side by side. Names begin with "wanted.".
/// - `kept_bytes(tokens, context)`: the memory that `forward` keeps for the gradient of a call of such shapes.
/// - `forward(in, out, kept, run)`: computes as without `kept`, in the same workspace.
/// - `backward_workspace_bytes(tokens, context, concurrency)`: the scratch memory that `backward` needs.
/// - `backward(in, kept, d_out, wanted, run)`: computes. Everything has been checked; it allocates nothing and writes only to `wanted`.
template <class L>
concept DifferentiableLayer =
    Layer<L> && requires { typename L::gradients; } &&
    requires(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out, std::byte* kept,
             const layer_gradients<L>& wanted, const shape& s, const execution& run) {
        layer.for_each_gradient(in, wanted.parameters, [](std::string_view, const tensor_view<typename L::scalar>&, const shape&, bool) {});
        { layer.kept_bytes(s, s) } -> std::same_as<std::size_t>;
        layer.forward(in, out, kept, run);
        { layer.backward_workspace_bytes(s, s, index_t{1}) } -> std::same_as<std::size_t>;
        layer.backward(in, static_cast<const std::byte*>(kept), out, wanted, run);
    };

namespace detail {

/// The gradients of the parameters of a layer or a norm; of one that has no gradient, none.
template <class L>
no_gradients gradients_inside();
template <class L>
    requires requires { typename L::gradients; }
typename L::gradients gradients_inside();
template <class L>
using parameter_gradients = decltype(gradients_inside<L>());

/// A norm that a layer can be trained with.
template <class N>
concept TrainableNorm = DifferentiableNorm<N> || std::same_as<N, identity_norm<typename N::scalar>>;

/// Bytes of workspace that a layer or a norm inside needs for such tokens and context, in a forward or in its gradient.
template <bool backward, class L>
std::size_t inner_bytes(const L& inner, const shape& tokens, const shape& context, index_t concurrency) {
    if constexpr (Norm<L> && !backward) return inner.workspace_bytes(tokens, concurrency);
    else if constexpr (DifferentiableNorm<L>) return inner.backward_workspace_bytes(tokens, concurrency);
    else if constexpr (Norm<L>) return 0;
    else if constexpr (backward) return inner.backward_workspace_bytes(tokens, context, concurrency);
    else return inner.workspace_bytes(tokens, context, concurrency);
}

/// Runs a layer inside, which keeps what its gradient needs if there is memory for that.
template <Layer L>
void forward_inside(const L& inner, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out, std::byte* kept,
                    const execution& run) {
    if constexpr (DifferentiableLayer<L>)
        if (kept) return inner.forward(in, out, kept, run);
    inner.forward(in, out, run);
}

/// The gradient of a norm inside: `of_x`, and what else is wanted.
template <DifferentiableNorm N>
void backward_inside(const N& norm, typename N::gradients wanted, const tensor_view<const typename N::scalar>& x,
                     const tensor_view<const typename N::scalar>& d_out, const tensor_view<typename N::scalar>& of_x,
                     const execution& run) {
    wanted.x = of_x;
    norm.backward(x, d_out, wanted, run);
}

/// A visitor of the gradients of a member.
auto visit_member(std::string_view member, const auto& visit) {
    return [member, &visit](std::string_view name, const auto& view, const shape& expected, bool rows) {
        visit(nested_name(member, name), view, expected, rows);
    };
}

/// Calls visit(name, view, shape, rows) for the gradients of a norm's parameters, as a layer does for its own.
template <class N, class G, class V>
void for_each_norm_gradient(const G& wanted, index_t channels, const V& visit) {
    const auto row = [&](std::string_view name, const auto& numbers, index_t count) {
        visit(name, as_row(numbers), shape{.tokens = 1, .channels = count}, true);
    };
    if constexpr (requires { wanted.rep; }) { // a progressive norm's
        for_each_norm_gradient<decltype(N::norm.norm)>(wanted.norm, channels, visit_member("norm", visit));
        for_each_norm_gradient<decltype(N::norm.rep)>(wanted.rep, channels, visit_member("rep", visit));
    } else if constexpr (requires { wanted.weight; }) {
        row("wanted.weight", wanted.weight, channels);
        row("wanted.bias", wanted.bias, N::adds_bias ? channels : 0);
        visit_single_numbers(wanted, visit);
    }
}

/// Throws argument_error if the memory for what is kept is too small.
template <DifferentiableLayer L>
void check_kept(const L& layer, const layer_inputs<typename L::scalar>& in, const workspace& kept) {
    const auto needed = layer.kept_bytes(in.tokens.shape(), in.context.shape());
    if (kept.size_bytes() < needed)
        detail::raise(argument_error(L::name, "kept", "has ", kept.size_bytes(), " bytes, but the gradient for tokens of shape ",
                                     in.tokens.shape(), " needs ", needed));
}

/// Throws attention_error unless the gradients of a call can be computed.
template <DifferentiableLayer L>
void check_layer_backward(const L& layer, const layer_inputs<typename L::scalar>& in, const workspace& kept,
                          const tensor_view<const typename L::scalar>& d_out, const layer_gradients<L>& wanted) {
    using T = typename L::scalar;
    layer.check(in);
    check_rows(L::name, "d_out", d_out);
    if (const auto expected = layer.output_shape(in.tokens.shape()); d_out.shape() != expected)
        refuse_result(L::name, "d_out", d_out.shape(), expected);
    check_kept(layer, in, kept);
    if (wanted.context.data() && !is_given(in.context))
        detail::raise(argument_error(L::name, "wanted.context", "is asked for, but there is no context"));
    if (wanted.value_context.data() && !is_given(in.value_context))
        detail::raise(argument_error(L::name, "wanted.value_context", "is asked for, but there is no value_context"));
    const auto for_each = [&](const auto& visit) {
        visit("wanted.tokens", wanted.tokens, in.tokens.shape(), true);
        visit("wanted.context", wanted.context, in.context.shape(), true);
        visit("wanted.value_context", wanted.value_context, in.value_context.shape(), true);
        layer.for_each_gradient(in, wanted.parameters, visit);
    };
    check_gradients<T>(L::name, for_each, [&](const output_memory& memory) {
        memory.require_apart("tokens", in.tokens);
        memory.require_apart("context", in.context);
        memory.require_apart("value_context", in.value_context);
        memory.require_apart("positions.first_query", in.positions.first_query);
        memory.require_apart("positions.first_key", in.positions.first_key);
        memory.require_apart("d_out", d_out);
        memory.require_apart("kept", kept.bytes());
        layer.check_apart(memory);
    });
}

} // namespace detail

/// Bytes of memory that the gradient of such a call needs to be kept by its `forward`. Throws attention_error if the call is refused.
template <DifferentiableLayer L>
std::size_t kept_bytes(const L& layer, const layer_inputs<typename L::scalar>& in) {
    layer.check(in);
    return layer.kept_bytes(in.tokens.shape(), in.context.shape());
}

/// Runs a layer as `forward` does, to the same bits, and keeps what its gradient needs in the caller's memory: kept_bytes of it, whose
/// contents are the library's own, valid until they are overwritten. Training is not done in place: out is apart from the tokens, which the
/// gradient reads again. Throws attention_error as `forward` does, and if there is too little memory to keep.
template <DifferentiableLayer L>
void forward(const L& layer, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out, workspace& kept,
             const detail::call_execution& run = {}) {
    detail::check_forward(layer, in, out);
    const output_memory memory(L::name, "out", out);
    memory.require_apart("tokens", in.tokens);
    memory.require_apart("kept", kept.bytes());
    detail::check_kept(layer, in, kept);
    detail::reserve_forward(layer, in, run);
    layer.forward(in, out, kept.bytes().data(), run);
}

/// Bytes of workspace that the gradient of such a call needs with such an executor or execution. Throws attention_error if the call is
/// refused.
template <DifferentiableLayer L>
std::size_t backward_workspace_bytes(const L& layer, const layer_inputs<typename L::scalar>& in, const detail::call_execution& run = {}) {
    layer.check(in);
    return layer.backward_workspace_bytes(in.tokens.shape(), in.context.shape(), run.concurrency());
}

/// The gradient of a loss with respect to what a layer read, and to its parameters: from the inputs of a call, what its `forward` kept, and
/// `d_out`, the gradient of the loss by what it wrote, (batch, 1, n, channels), channels side by side. A pure function:
///     workspace kept(kept_bytes(layer, in));
///     forward(layer, in, out, kept);
///     backward(layer, in, kept, d_out, {.tokens = d_tokens, .parameters = {.weight = d_weight}});
/// What has no memory in `wanted` is not computed. The same bits for every executor and number of threads; `run` as in `attend`.
/// Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or another
/// gradient, a given workspace too small.
template <DifferentiableLayer L>
void backward(const L& layer, const layer_inputs<typename L::scalar>& in, const workspace& kept,
              const std::type_identity_t<tensor_view<const typename L::scalar>>& d_out,
              const std::type_identity_t<layer_gradients<L>>& wanted, const detail::call_execution& run = {}) {
    detail::check_layer_backward(layer, in, kept, d_out, wanted);
    run.reserve(L::name, "the gradient for tokens", in.tokens.shape(),
                layer.backward_workspace_bytes(in.tokens.shape(), in.context.shape(), run.concurrency()));
    layer.backward(in, kept.bytes().data(), d_out, wanted, run);
}

} // namespace attn
