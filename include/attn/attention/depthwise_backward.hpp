// The gradient of a depthwise convolution.
#pragma once

#include "../kernel/convolution/depthwise_backward.hpp"
#include "depthwise_convolution.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a depthwise convolution read: its input (batch, x_heads, n, c), its weights, and its bias,
/// in their shapes. What has no memory is not wanted, and not computed. That of what the convolution was added to is the gradient given.
template <Scalar T>
struct depthwise_gradients {
    tensor_view<T> input = {};
    tensor_view<T> weights = {};
    std::span<T> bias = {};
};

namespace detail {

template <Scalar T>
void check_depthwise_backward(const depthwise_convolution<T>& op, const tensor_view<const T>& x, const tensor_view<const T>& given,
                              const attn::depthwise_gradients<T>& wanted) {
    constexpr auto name = depthwise_convolution<T>::name;
    check_convolved(name, x, "given", given);
    op.check(name, x.shape(), given.shape());
    const auto row = [](auto* numbers, index_t count) { return head_major(numbers, {.tokens = 1, .channels = count}); };
    const std::array written{std::pair("wanted.input", wanted.input), std::pair("wanted.weights", wanted.weights),
                             std::pair("wanted.bias", row(wanted.bias.data(), std::ssize(wanted.bias)))};
    const std::array expected{x.shape(), op.weights.shape(), shape{.tokens = 1, .channels = std::ssize(op.bias)}};
    for (std::size_t g = 0; g < written.size(); ++g) {
        const auto& [argument, view] = written[g];
        if (!view.data()) continue;
        if (g == 2 && op.bias.empty() && !wanted.bias.empty())
            throw argument_error(name, argument, "is asked for, but the convolution has no bias");
        check_view(name, argument, view);
        check_writable(name, argument, view);
        if (view.shape() != expected[g])
            throw shape_error(name, argument, "has shape " + to_string(view.shape()) + ", but " + to_string(expected[g]) + " is needed");
        const output_memory memory(name, argument, view);
        memory.require_apart("x", x);
        memory.require_apart("given", given);
        op.check_apart(memory);
        for (std::size_t e = 0; e < g; ++e) memory.require_apart(written[e].first, written[e].second);
    }
}

} // namespace detail

/// Bytes of workspace that the gradient of a convolution of x, (batch, x_heads, n, c), into (batch, heads, n, c) needs.
template <Scalar T>
std::size_t backward_workspace_bytes(const depthwise_convolution<T>& op, const shape& x, const shape& out, index_t concurrency) {
    return kernel::depthwise_backward<T, T>(op.grid(x.tokens), x, out).workspace_bytes(concurrency);
}

/// The gradient of a depthwise convolution: from its input x and the gradient of the loss by its output, `given` (batch, heads, n, c),
///     d input[b, g, (y, x), c] = sum over heads h that read g, and (ky, kx), of
///                                weights[h, c, ky, kx] given[b, h, (y + top - ky, x + left - kx), c]
///     d weights[h, c, ky, kx] = sum over b, (y, x) of given[b, h, (y, x), c] x[b, g, (y - top + ky, x - left + kx), c]
///     d bias[h, c] = sum over b, (y, x) of given[b, h, (y, x), c]
/// where (top, left) is (kernel_height / 2, kernel_width / 2), or (0, width - 1) if causal; and sums over the heads that share weights or
/// bias. Time: 4 n c kernel_height kernel_width flops a head. Memory: a few tiles a thread, and up to 64 sums of each tap and head.
/// Gives the same bits for every executor, number of threads and strides. Allocates nothing. Throws attention_error, before anything is
/// read or written: shapes or parameters that do not fit, a gradient that overlaps what is read or another gradient, a workspace too small.
template <Scalar T>
void backward(const depthwise_convolution<T>& op, const std::type_identity_t<tensor_view<const T>>& x,
              const std::type_identity_t<tensor_view<const T>>& given, const std::type_identity_t<depthwise_gradients<T>>& wanted,
              const execution& run) {
    detail::check_depthwise_backward(op, x, given, wanted);
    run.reserve(op.name, "x", x.shape(), backward_workspace_bytes(op, x.shape(), given.shape(), run.concurrency()));
    const auto channels = x.shape().channels, tokens = x.shape().tokens;
    const auto weights = wanted.weights.data() ? op.kernels_of(wanted.weights, channels) : tensor_view<T>{};
    const auto grid = op.grid(tokens);
    const kernel::depthwise_backward<T, T> gradients(grid, x.shape(), given.shape());
    const auto all = [&](index_t) { return tokens; };
    gradients({grid, op.kernels(channels), op.bias}, x, given, {wanted.input, weights, wanted.bias}, all, run.workspace().bytes().data(),
              run);
}

/// The gradient of a depthwise convolution with a workspace that is made for the call: see backward(op, x, given, wanted, run).
template <Scalar T, ExecutorArgument E = sequential>
void backward(const depthwise_convolution<T>& op, const std::type_identity_t<tensor_view<const T>>& x,
              const std::type_identity_t<tensor_view<const T>>& given, const std::type_identity_t<depthwise_gradients<T>>& wanted,
              E&& executor = {}) {
    detail::check_depthwise_backward(op, x, given, wanted);
    workspace memory(backward_workspace_bytes(op, x.shape(), given.shape(), detail::concurrency_of(executor)));
    backward(op, x, given, wanted, execution(executor, memory));
}

} // namespace attn
