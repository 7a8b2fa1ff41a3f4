// The gradient of a norm, and the front door through which all of them are called.
#pragma once

#include "norm.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a norm read: x (batch, heads, tokens, channels), weight and bias (channels). What has no
/// memory is not wanted, and not computed.
template <Scalar T>
struct norm_gradients {
    tensor_view<T> x = {};
    std::span<T> weight = {};
    std::span<T> bias = {};
};

/// A norm that has a gradient.
/// - `gradients`: norm_gradients, or what else names its parameters, and x.
/// - `backward_workspace_bytes(shape, concurrency)`: the scratch memory that `backward` needs.
/// - `backward(x, given, wanted, run)`: computes. Everything has been checked; it allocates nothing and writes only to `wanted`.
/// - `adds_bias`, where gradients are norm_gradients: false if it knows no bias.
template <class N>
concept DifferentiableNorm = Norm<N> && requires(const N& norm, const shape& s, const tensor_view<const typename N::scalar>& x,
                                                 const typename N::gradients& wanted, const execution& run) {
    { norm.backward_workspace_bytes(s, index_t{1}) } -> std::same_as<std::size_t>;
    norm.backward(x, x, wanted, run);
};

namespace detail {

/// Throws attention_error unless the gradients fit x and are apart from all that is read, and from each other. given: that of the norm's
/// output.
template <Scalar T>
void check_norm_gradients(std::string_view operation, const tensor_view<const T>& x, const tensor_view<const T>& given,
                          const norm_gradients<T>& wanted, bool has_bias) {
    check_rows(operation, "x", x);
    check_rows(operation, "given", given);
    if (given.shape() != x.shape())
        throw shape_error(operation, "given", "has shape " + to_string(given.shape()) + ", but x has " + to_string(x.shape()));
    const std::array written{std::pair("wanted.x", wanted.x), std::pair("wanted.weight", as_row(wanted.weight)),
                             std::pair("wanted.bias", as_row(wanted.bias))};
    for (std::size_t g = 0; g < written.size(); ++g) {
        const auto& [argument, view] = written[g];
        if (!view.data()) continue;
        check_rows(operation, argument, view);
        check_writable(operation, argument, view);
        const auto expected = g == 0 ? x.shape() : shape{.tokens = 1, .channels = x.shape().channels};
        if (view.shape() != expected)
            throw shape_error(operation, argument, "has shape " + to_string(view.shape()) + ", but x has shape " + to_string(x.shape()));
        if (g == 2 && !has_bias) throw argument_error(operation, argument, "is asked for, but the norm has no bias");
        const output_memory memory(operation, argument, view);
        memory.require_apart("x", x);
        memory.require_apart("given", given);
        for (std::size_t e = 0; e < g; ++e) memory.require_apart(written[e].first, written[e].second);
    }
}

} // namespace detail

/// The gradient of a loss with respect to what `normalise` read, from x and the gradient of the loss with respect to what it wrote, a pure
/// function. Statistics of rows are taken again. Channels side by side, any row strides.
/// Gives the same bits for every executor, number of threads and strides. Allocates nothing.
/// Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or another
/// gradient, a workspace too small.
template <DifferentiableNorm N>
    requires std::same_as<typename N::gradients, norm_gradients<typename N::scalar>>
void backward(const N& norm, const tensor_view<const typename N::scalar>& x, const tensor_view<const typename N::scalar>& given,
              const norm_gradients<typename N::scalar>& wanted, const execution& run) {
    detail::check_norm_gradients(N::name, x, given, wanted, N::adds_bias);
    norm.check(x.shape());
    for (const auto& [argument, view] : {std::pair("wanted.x", wanted.x), std::pair("wanted.weight", detail::as_row(wanted.weight)),
                                         std::pair("wanted.bias", detail::as_row(wanted.bias))})
        check_apart(norm, output_memory(N::name, argument, view));
    run.reserve(N::name, "x", x.shape(), norm.backward_workspace_bytes(x.shape(), run.concurrency()));
    norm.backward(x, given, wanted, run);
}

/// The gradient of a norm with a workspace that is made for the call: see backward(norm, x, given, wanted, run).
template <DifferentiableNorm N, ExecutorArgument E = sequential>
    requires std::same_as<typename N::gradients, norm_gradients<typename N::scalar>>
void backward(const N& norm, const tensor_view<const typename N::scalar>& x, const tensor_view<const typename N::scalar>& given,
              const norm_gradients<typename N::scalar>& wanted, E&& executor = {}) {
    detail::check_norm_gradients(N::name, x, given, wanted, N::adds_bias);
    workspace memory(norm.backward_workspace_bytes(x.shape(), detail::concurrency_of(executor)));
    backward(norm, x, given, wanted, execution(executor, memory));
}

} // namespace attn
