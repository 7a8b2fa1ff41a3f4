// The gradient of a norm, and the front door through which all of them are called.
#pragma once

#include "../core/gradients.hpp"
#include "norm.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradient of a loss with respect to what a norm without parameters read: x (batch, heads, tokens, channels).
template <Scalar T>
struct token_gradients {
    tensor_view<T> x = {};
};

/// A norm that has a gradient.
/// - `gradients`: norm_gradients, token_gradients, or what else names its parameters, and x.
/// - `backward_workspace_bytes(shape, concurrency)`: the scratch memory that `backward` needs.
/// - `backward(x, d_out, wanted, run)`: computes. Everything has been checked; it allocates nothing and writes only to `wanted`.
/// - `adds_bias`: false if it knows no bias.
template <class N>
concept DifferentiableNorm = Norm<N> && requires(const N& norm, const shape& s, const tensor_view<const typename N::scalar>& x,
                                                 const typename N::gradients& wanted, const execution& run) {
    { N::adds_bias } -> std::convertible_to<bool>;
    { norm.backward_workspace_bytes(s, index_t{1}) } -> std::same_as<std::size_t>;
    norm.backward(x, x, wanted, run);
};

namespace detail {

/// Throws attention_error unless what is given fits x, and the gradients, of which for_each(visit) visits all, can be written: see
/// check_gradients. d_out: the gradient of the norm's output.
template <Scalar T>
void check_norm_gradients(std::string_view operation, const tensor_view<const T>& x, const tensor_view<const T>& d_out,
                          const auto& for_each, const auto& require_apart) {
    check_rows(operation, "x", x);
    check_rows(operation, "d_out", d_out);
    if (d_out.shape() != x.shape()) detail::raise(shape_error(operation, "d_out", "has shape ", d_out.shape(), ", but x has ", x.shape()));
    check_gradients<T>(operation, for_each, [&](const output_memory& memory) {
        memory.require_apart("x", x);
        memory.require_apart("d_out", d_out);
        require_apart(memory);
    });
}
/// Visits the gradients of the parameters of a norm over so many channels, which are named `names`. Throws argument_error if one of a bias
/// is wanted that the norm does not know.
template <Scalar T>
void visit_parameters(std::string_view operation, std::array<std::string_view, 2> names, const norm_gradients<T>& wanted, index_t channels,
                      bool has_bias, const auto& visit) {
    if (!wanted.bias.empty() && !has_bias) detail::raise(argument_error(operation, names[1], "is asked for, but the norm has no bias"));
    visit(names[0], as_row(wanted.weight), shape{.tokens = 1, .channels = channels}, true);
    visit(names[1], as_row(wanted.bias), shape{.tokens = 1, .channels = channels}, true);
}
/// Visits the gradients of what is one number, of norms that have such a parameter.
void visit_single_numbers(const auto& wanted, const auto& visit) {
    const auto one = [&](std::string_view name, const auto& number) {
        visit(name, as_row(number), shape{.tokens = 1, .channels = 1}, true);
    };
    if constexpr (requires { wanted.eta; }) one("wanted.eta", wanted.eta);
    if constexpr (requires { wanted.alpha; }) one("wanted.alpha", wanted.alpha);
    if constexpr (requires { wanted.shift; }) one("wanted.shift", wanted.shift);
}

} // namespace detail

/// Bytes of workspace that the gradient of a norm of tokens of that shape needs with such an executor or execution.
template <DifferentiableNorm N>
std::size_t backward_workspace_bytes(const N& norm, const shape& x, const detail::call_execution& run = {}) {
    detail::check_shape<typename N::scalar>(N::name, "x", x);
    return norm.backward_workspace_bytes(x, run.concurrency());
}

/// The gradient of a loss with respect to what `normalise` read, from x and the gradient of the loss with respect to what it wrote, a pure
/// function. Statistics of rows are taken again. Channels side by side, any row strides.
/// Gives the same bits for every executor, number of threads and strides. `run` as in `attend`.
/// Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or another
/// gradient, a given workspace too small.
template <DifferentiableNorm N>
    requires std::same_as<typename N::gradients, token_gradients<typename N::scalar>> ||
             std::derived_from<typename N::gradients, norm_gradients<typename N::scalar>>
void backward(const N& norm, const tensor_view<const typename N::scalar>& x, const tensor_view<const typename N::scalar>& d_out,
              const typename N::gradients& wanted, const detail::call_execution& run = {}) {
    using T = typename N::scalar;
    const auto for_each = [&](const auto& visit) {
        visit("wanted.x", wanted.x, x.shape(), true);
        if constexpr (std::derived_from<typename N::gradients, norm_gradients<T>>)
            detail::visit_parameters<T>(N::name, {"wanted.weight", "wanted.bias"}, wanted, x.shape().channels, N::adds_bias, visit);
        detail::visit_single_numbers(wanted, visit);
    };
    detail::check_norm_gradients(N::name, x, d_out, for_each, [&](const output_memory& memory) { norm.check_apart(memory); });
    norm.check(x.shape());
    run.reserve(N::name, "the gradient for x", x.shape(), backward_workspace_bytes(norm, x.shape(), run));
    norm.backward(x, d_out, wanted, run);
}

} // namespace attn
