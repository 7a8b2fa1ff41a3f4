// The gradient of a depthwise convolution.
#pragma once

#include "../core/gradients.hpp"
#include "../kernel/convolution/depthwise_backward.hpp"
#include "depthwise_convolution.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T>
void check_depthwise_backward(const depthwise_convolution<T>& op, const tensor_view<const T>& x, const tensor_view<const T>& d_out,
                              const attn::depthwise_gradients<T>& wanted) {
    constexpr auto name = depthwise_convolution<T>::name;
    check_convolved(name, x, "d_out", d_out);
    op.check(name, x.shape(), d_out.shape());
    if (!wanted.bias.empty() && op.bias.empty())
        detail::raise(argument_error(name, "wanted.bias", "is asked for, but the convolution has no bias"));
    const auto for_each = [&](const auto& visit) {
        visit("wanted.input", wanted.input, x.shape(), false);
        visit("wanted.weights", wanted.weights, op.weights.shape(), false);
        visit("wanted.bias", as_row(wanted.bias), shape{.tokens = 1, .channels = std::ssize(op.bias)}, false);
    };
    check_gradients<T>(name, for_each, [&](const output_memory& memory) {
        memory.require_apart("x", x);
        memory.require_apart("d_out", d_out);
        op.check_apart(memory);
    });
}

} // namespace detail

/// Bytes of workspace that the gradient of a convolution of x, (batch, x_heads, n, c), into (batch, heads, n, c) needs with such an
/// executor or execution.
template <Scalar T>
std::size_t backward_workspace_bytes(const depthwise_convolution<T>& op, const shape& x, const shape& out,
                                     const detail::call_execution& run = {}) {
    return kernel::depthwise_backward<T, T>(op.grid(x.tokens), x, out).workspace_bytes(run.concurrency());
}

/// The gradient of a depthwise convolution: from its input x and the gradient of the loss by its output, `d_out` (batch, heads, n, c),
///     d input[b, g, (y, x), c] = sum over heads h that read g, and (ky, kx), of
///                                weights[h, c, ky, kx] d_out[b, h, (y + top - ky, x + left - kx), c]
///     d weights[h, c, ky, kx] = sum over b, (y, x) of d_out[b, h, (y, x), c] x[b, g, (y - top + ky, x - left + kx), c]
///     d bias[h, c] = sum over b, (y, x) of d_out[b, h, (y, x), c]
/// where (top, left) is (kernel_height / 2, kernel_width / 2), or (0, width - 1) if causal; and sums over the heads that share weights or
/// bias. Time: 4 n c kernel_height kernel_width flops a head. Memory: a few tiles a thread, and up to 64 sums of each tap and head.
/// Gives the same bits for every executor, number of threads and strides. `run` as in `attend`. Throws attention_error, before anything is
/// read or written: shapes or parameters that do not fit, a gradient that overlaps what is read or another gradient, a given workspace too
/// small.
template <Scalar T>
void backward(const depthwise_convolution<T>& op, const std::type_identity_t<tensor_view<const T>>& x,
              const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<depthwise_gradients<T>>& wanted,
              const detail::call_execution& run = {}) {
    detail::check_depthwise_backward(op, x, d_out, wanted);
    run.reserve(op.name, "x", x.shape(), backward_workspace_bytes(op, x.shape(), d_out.shape(), run));
    const auto channels = x.shape().channels, tokens = x.shape().tokens;
    const auto weights = wanted.weights.data() ? op.kernels_of(wanted.weights, channels) : tensor_view<T>{};
    const auto grid = op.grid(tokens);
    const kernel::depthwise_backward<T, T> gradients(grid, x.shape(), d_out.shape());
    const auto all = [&](index_t) { return tokens; };
    gradients({grid, op.kernels(channels), op.bias}, x, d_out, {wanted.input, weights, wanted.bias}, all, run.workspace().bytes().data(),
              run);
}

} // namespace attn
