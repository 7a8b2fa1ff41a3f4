// The gradient of a causal convolution.
#pragma once

#include "../kernel/convolution/causal_backward.hpp"
#include "causal_convolution.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a causal convolution read: x, the weights, the bias, and the first state, also where none
/// was given, in their shapes. What has no memory is not wanted, and not computed.
template <Scalar T>
struct causal_convolution_gradients {
    tensor_view<T> x = {};
    tensor_view<T> weights = {};
    std::span<T> bias = {};
    tensor_view<T> first_state = {};
    tensor_view<const T> d_last_state = {}; ///< is read: the gradient of the loss with respect to the last state, 0 if it is not given
};

namespace detail {

/// f(what computes the gradient of a convolution of tokens of that shape).
template <Scalar T, class F>
auto with_causal_backward(const causal_convolution<T, F>& op, const shape& x, bool streaming, const auto& f) {
    const kernel::causal_parameters<T> parameters{op.weights, op.bias};
    if constexpr (std::same_as<F, identity_features>) return f(kernel::causal_backward<T, kernel::unchanged>(parameters, {}, x, streaming));
    else return f(kernel::causal_backward<T, F>(parameters, op.activation, x, streaming));
}

template <Scalar T, class F>
void check_causal_backward(const causal_convolution<T, F>& op, const tensor_view<const T>& x, const tensor_view<const T>& d_out,
                           const attn::causal_convolution_gradients<T>& wanted) {
    op.check(x);
    if (op.first_state.is_narrow())
        detail::raise(argument_error(op.name, "first_state", "is stored in 16 bits: gradients are computed of numbers that are not"));
    check_view(op.name, "d_out", d_out);
    if (d_out.shape() != x.shape()) refuse_result(op.name, "d_out", d_out.shape(), x.shape());
    const auto states = op.state_shape(x.shape());
    check_optional_input(op.name, "wanted.d_last_state", wanted.d_last_state, states);
    if (!wanted.bias.empty() && op.bias.empty())
        detail::raise(argument_error(op.name, "wanted.bias", "is asked for, but the convolution has no bias"));
    const auto for_each = [&](const auto& visit) {
        visit("wanted.x", wanted.x, x.shape(), false);
        visit("wanted.weights", wanted.weights, op.weights.shape(), false);
        visit("wanted.bias", as_row(wanted.bias), shape{.tokens = 1, .channels = std::ssize(op.bias)}, false);
        visit("wanted.first_state", wanted.first_state, states, false);
    };
    check_gradients<T>(op.name, for_each, [&](const output_memory& memory) {
        memory.require_apart("x", x);
        memory.require_apart("d_out", d_out);
        memory.require_apart("d_last_state", wanted.d_last_state);
        op.check_apart(memory);
    });
}

} // namespace detail

/// Bytes of workspace that the gradient of a causal convolution of tokens of that shape needs with such an executor or execution.
template <Scalar T, class F>
std::size_t backward_workspace_bytes(const causal_convolution<T, F>& op, const shape& x, const detail::call_execution& run = {}) {
    const auto bytes = [&](const shape& s) {
        return detail::with_causal_backward(op, s, false, [&](const auto& kernel) { return kernel.workspace_bytes(run.concurrency()); });
    };
    return std::max(bytes(x), bytes({x.batch, 1, x.tokens, detail::product(x.heads, x.channels)})); // perhaps heads lie side by side
}

/// The gradient of a causal convolution, from its input x and the gradient of the loss by its output, `d_out` (batch, heads, n, channels).
/// With z what the activation maps, which is computed again, g = d_out activation'(z), 0 outside the tokens, and X the first state and x
/// behind it:
///     d X[e, c] = d_last_state[e - n, c] + sum over t < taps of weights[c, t] g[e - t, c]
///     d weights[c, t] = sum over batch, i of g[i, c] X[i + t, c],      d bias[c] = sum over batch, i of g[i, c]
/// Of a sequence in pieces, each given as d_last_state the gradient of the first state of the next, the gradients of x and of the first
/// state have the bits of the whole. Time: about twice that of the convolution. Memory: some tiles a thread, and up to 64 sums of each
/// tap. Gives the same bits for every executor, number of threads and strides. `run` as in `attend`. Throws attention_error, before
/// anything is read or written: shapes that do not fit, tokens or states stored in 16 bits, a gradient that overlaps what is read or
/// another gradient, a given workspace too small.
template <Scalar T, class F>
void backward(const causal_convolution<T, F>& op, const std::type_identity_t<tensor_view<const T>>& x,
              const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<causal_convolution_gradients<T>>& wanted,
              const detail::call_execution& run = {}) {
    detail::check_causal_backward(op, x, d_out, wanted);
    run.reserve(op.name, "the gradient for x", x.shape(), backward_workspace_bytes(op, x.shape(), run));
    using read = stored_view<const T>;
    using written = stored_view<T>;
    const bool streaming = wanted.x.data() && detail::worth_streaming<T>(x, wanted.x);
    const auto compute = [&](const read& from, const read& state, const read& given, const read& d_state, const written& to,
                             const written& to_state) {
        detail::with_causal_backward(op, from.shape(), streaming, [&](const auto& kernel) {
            kernel(from, state, given, d_state, {to, to_state, wanted.weights, wanted.bias}, run.workspace().bytes().data(), run);
        });
    };
    kernel::with_joined_heads(compute, read(x), op.first_state, read(d_out), read(wanted.d_last_state), written(wanted.x),
                              written(wanted.first_state));
}

} // namespace attn
