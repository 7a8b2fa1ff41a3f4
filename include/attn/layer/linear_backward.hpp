// The gradient of a linear layer.
#pragma once

#include "linear.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a linear layer read: tokens (batch, 1, n, inputs), weight (1, 1, outputs, inputs), and bias
/// (outputs). What has no memory is not wanted, and not computed. That of a residual is the gradient given.
template <Scalar T>
struct linear_gradients {
    tensor_view<T> tokens = {};
    tensor_view<T> weight = {};
    std::span<T> bias = {};
};

namespace detail {

/// The products of a linear layer's gradient on `rows` tokens at a time.
template <Scalar T, class Arch>
struct linear_products {
    kernel::matrix_product<T, Arch> of_tokens, of_weight, of_bias;

    linear_products(index_t rows, index_t inputs, index_t outputs) : of_tokens(rows, outputs, inputs), of_weight(outputs, rows, inputs), of_bias(1, rows, outputs) {}
    std::size_t workspace_bytes(index_t concurrency) const {
        return std::max({of_tokens.workspace_bytes(concurrency), of_weight.workspace_bytes(concurrency), of_bias.workspace_bytes(concurrency)});
    }
};

template <Scalar T, class Arch>
void check_linear_backward(const linear<T, Arch>& layer, const tensor_view<const T>& x, const tensor_view<const T>& given, const linear_gradients<T>& wanted) {
    constexpr auto name = linear<T, Arch>::name;
    layer.check({.tokens = x});
    check_tokens(name, "given", given, layer.outputs());
    if (given.shape() != layer.output_shape(x.shape()))
        throw shape_error(name, "given", "has shape " + to_string(given.shape()) + ", but the result has " + to_string(layer.output_shape(x.shape())));
    const auto bias = head_major(wanted.bias.data(), {.tokens = 1, .channels = std::ssize(wanted.bias)});
    const std::array written{std::pair("wanted.tokens", wanted.tokens), std::pair("wanted.weight", wanted.weight), std::pair("wanted.bias", bias)};
    const std::array expected{x.shape(), layer.weight.shape(), shape{.tokens = 1, .channels = layer.outputs()}};
    for (std::size_t g = 0; g < written.size(); ++g) {
        const auto& [argument, view] = written[g];
        if (!view.data()) continue;
        check_rows(name, argument, view);
        check_writable(name, argument, view);
        if (view.shape() != expected[g])
            throw shape_error(name, argument, "has shape " + to_string(view.shape()) + ", but " + to_string(expected[g]) + " is needed");
        const output_memory memory(name, argument, view);
        memory.require_apart("tokens", x);
        memory.require_apart("given", given);
        layer.check_apart(memory);
        for (std::size_t e = 0; e < g; ++e) memory.require_apart(written[e].first, written[e].second);
    }
}

} // namespace detail

/// Bytes of workspace that the gradient of a linear layer on such tokens needs.
template <Scalar T, class Arch>
std::size_t backward_workspace_bytes(const linear<T, Arch>& layer, const shape& tokens, index_t concurrency) {
    return detail::linear_products<T, Arch>(tokens.batch * tokens.tokens, layer.inputs(), layer.outputs()).workspace_bytes(concurrency);
}

/// The gradient of a linear layer, y = W x + b: from the tokens x and the gradient of the loss by y, `given` (batch, 1, n, outputs),
///     d x = W^T given,      d W = sum over tokens of given x^T,      d b = sum over tokens of given
/// Channels side by side, in the weight's gradient too. The same bits for every executor and number of threads. Allocates nothing.
/// Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or another
/// gradient, a workspace too small.
template <Scalar T, class Arch>
void backward(const linear<T, Arch>& layer, const std::type_identity_t<tensor_view<const T>>& x, const std::type_identity_t<tensor_view<const T>>& given,
              const std::type_identity_t<linear_gradients<T>>& wanted, const execution& run) {
    detail::check_linear_backward(layer, x, given, wanted);
    detail::check_workspace(layer.name, run, backward_workspace_bytes(layer, x.shape(), run.concurrency()), x.shape());
    const detail::row_matrices matrices(x.shape(), x, given, wanted.tokens);
    const detail::linear_products<T, Arch> products(matrices.rows, layer.inputs(), layer.outputs());
    auto* const memory = run.workspace().bytes().data();
    const auto block = [](const auto& t, index_t b) { return kernel::rows_of(t, b, 0); };
    const auto add = [&](const auto& product, const auto& a, const auto& b, const kernel::row_block<T>& sums) {
        product(a, b, {sums.data, sums.row_stride, 1}, {sums.data, sums.row_stride, 1}, memory, run);
    };
    static constexpr T one = 1;
    for (index_t o = 0; wanted.weight.data() && o < layer.outputs(); ++o) std::fill_n(wanted.weight.row(0, 0, o), layer.inputs(), T{0});
    std::ranges::fill(wanted.bias, T{0});
    for (index_t b = 0; b < matrices.count; ++b) {
        if (wanted.tokens.data()) {
            const auto to = block(wanted.tokens, b);
            products.of_tokens(block(given, b), block(layer.weight, 0), {nullptr, 0, 1}, {to.data, to.row_stride, 1}, memory, run);
        }
        if (wanted.weight.data()) add(products.of_weight, kernel::transposed(block(given, b)), block(x, b), block(wanted.weight, 0));
        if (!wanted.bias.empty()) add(products.of_bias, kernel::row_block<const T>{&one, 0, 0}, block(given, b), kernel::row_block<T>{wanted.bias.data(), 0, 1});
    }
}

/// The same, with a workspace for the call.
template <Scalar T, class Arch, ExecutorArgument E = sequential>
void backward(const linear<T, Arch>& layer, const std::type_identity_t<tensor_view<const T>>& x, const std::type_identity_t<tensor_view<const T>>& given,
              const std::type_identity_t<linear_gradients<T>>& wanted, E&& executor = {}) {
    detail::check_linear_backward(layer, x, given, wanted);
    workspace memory(backward_workspace_bytes(layer, x.shape(), detail::concurrency_of(executor)));
    backward(layer, x, given, wanted, execution(executor, memory));
}

} // namespace attn
