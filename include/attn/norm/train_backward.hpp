// The gradients of training steps: of what `train` computes.
#pragma once

#include "batch_gradients.hpp"
#include "progressive_rep_batch_norm.hpp"
#include "row_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a progressive_rep_batch_norm read: x, and the parameters of both of its norms, whose own x
/// are left empty.
template <Scalar T>
struct progressive_norm_gradients {
    tensor_view<T> x = {};
    norm_gradients<T> norm = {};
    rep_norm_gradients<T> rep = {};
};

namespace detail {

/// What is checked of the gradient of a training step: for_each(visit) visits the gradients of the parameters.
template <Norm N, Scalar T>
void check_train_backward(const N& norm, const tensor_view<const T>& x, const tensor_view<const T>& d_out, const tensor_view<T>& wanted_x,
                          const auto& for_each_parameter, const token_mask& mask, bool takes_statistics = true) {
    check_mask(N::name, mask, x.shape());
    const auto for_each = [&](const auto& visit) {
        visit("wanted.x", wanted_x, x.shape(), true);
        for_each_parameter(visit);
    };
    check_norm_gradients<T>(N::name, x, d_out, for_each, [&](const output_memory& memory) {
        memory.require_apart("mask", mask);
        norm.check_apart(memory);
    });
    if (!takes_statistics) return;
    if (const auto tokens = counted_tokens(mask, x.shape()); tokens < 2)
        throw shape_error(N::name, "x",
                          "of shape " + to_string(x.shape()) + " has " + std::to_string(tokens) +
                              " tokens that count, but training needs two for a variance");
}
/// Visits the gradients of the parameters of a rep_batch_norm.
template <Scalar T>
void visit_rep_parameters(std::string_view operation, std::array<std::string_view, 3> names, const rep_norm_gradients<T>& wanted,
                          index_t channels, const auto& visit) {
    visit_parameters(operation, {names[0], names[1]}, wanted, channels, true, visit);
    visit(names[2], as_row(wanted.eta), shape{.tokens = 1, .channels = 1}, true);
}

/// Bytes of workspace that the gradient of a training step of a norm needs.
template <FoldableNorm N>
std::size_t train_backward_bytes(const N&, const shape& x, index_t concurrency) {
    return batch_gradients<typename N::scalar>::workspace_bytes(x, concurrency);
}
/// Enough for either norm, which run one after the other.
template <DifferentiableNorm N>
std::size_t train_backward_bytes(const progressive_rep_batch_norm<N>& norm, const shape& x, index_t concurrency) {
    return std::max(norm.norm.backward_workspace_bytes(x, concurrency), train_backward_bytes(norm.rep, x, concurrency));
}

} // namespace detail

/// Bytes of workspace that the gradient of a training step of a norm over tokens of that shape needs with such an executor or execution.
template <FoldableNorm N>
std::size_t train_backward_workspace_bytes(const N& norm, const shape& x, const detail::call_execution& run = {}) {
    return detail::train_backward_bytes(norm, x, run.concurrency());
}

/// The gradient of a training step of a batch_norm, out = BN(x) with the statistics of this batch, through these statistics: from x and the
/// gradient of the loss by out, a pure function. A token that the mask leaves out was copied, and passes on what it is given.
/// Gives the same bits for every executor, number of threads and strides. `run` as in `attend`.
/// Throws attention_error, before anything is read or written: what `train` refuses, shapes that do not fit, a gradient that overlaps what
/// is read or another gradient, a given workspace too small.
template <Scalar T>
void train_backward(const batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
                    const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<norm_gradients<T>>& wanted,
                    const detail::call_execution& run = {}, const token_mask& mask = {}) {
    const rep_norm_gradients<T> all{wanted, {}};
    const auto for_each_parameter = [&](const auto& visit) {
        detail::visit_parameters<T>(norm.name, {"wanted.weight", "wanted.bias"}, wanted, x.shape().channels, true, visit);
    };
    detail::check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask);
    norm.check_parameters(norm.name, x.shape());
    run.reserve(norm.name, "the gradient for x", x.shape(), train_backward_workspace_bytes(norm, x.shape(), run));
    detail::batch_gradients<T>()(norm, {x, d_out, all, mask, 0, 1, 0}, run);
}

/// The gradient of a training step of a rep_batch_norm, out = BN(x) + eta x, as that of a batch_norm, out = BN(x).
template <Scalar T>
void train_backward(const rep_batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
                    const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<rep_norm_gradients<T>>& wanted,
                    const detail::call_execution& run = {}, const token_mask& mask = {}) {
    const auto for_each_parameter = [&](const auto& visit) {
        detail::visit_rep_parameters<T>(norm.name, {"wanted.weight", "wanted.bias", "wanted.eta"}, wanted, x.shape().channels, visit);
    };
    detail::check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask);
    norm.check_parameters(norm.name, x.shape());
    run.reserve(norm.name, "the gradient for x", x.shape(), train_backward_workspace_bytes(norm, x.shape(), run));
    detail::batch_gradients<T>()(norm.batch, {x, d_out, wanted, mask, norm.eta, 1, 0}, run);
}

/// The gradient of a training step of a progressive_rep_batch_norm, out = gamma N(x) + (1 - gamma) RepBN(x): gamma of the gradient goes
/// through N and 1 - gamma through RepBN. Without gamma, as in the warm-up, N alone; then the gradients of RepBN's parameters are 0.
template <DifferentiableNorm N>
void train_backward(const progressive_rep_batch_norm<N>& norm, const tensor_view<const typename N::scalar>& x,
                    const tensor_view<const typename N::scalar>& d_out, const progressive_norm_gradients<typename N::scalar>& wanted,
                    std::optional<double> gamma, const detail::call_execution& run = {}, const token_mask& mask = {}) {
    using T = typename N::scalar;
    rep_norm_gradients<T> of_rep = wanted.rep;
    norm_gradients<T> of_norm = wanted.norm;
    of_rep.x = of_norm.x = wanted.x;
    const auto for_each_parameter = [&](const auto& visit) {
        const auto channels = x.shape().channels;
        detail::visit_parameters<T>(norm.name, {"wanted.norm.weight", "wanted.norm.bias"}, of_norm, channels, N::adds_bias, visit);
        detail::visit_rep_parameters<T>(norm.name, {"wanted.rep.weight", "wanted.rep.bias", "wanted.rep.eta"}, of_rep, channels, visit);
    };
    detail::check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask, gamma.has_value());
    norm.norm.check(x.shape());
    norm.rep.check_parameters(norm.name, x.shape());
    if (gamma && !(*gamma >= 0 && *gamma <= 1))
        throw argument_error(norm.name, "gamma", "is " + std::to_string(*gamma) + ", but must lie between 0 and 1");
    run.reserve(norm.name, "the gradient for x", x.shape(), train_backward_workspace_bytes(norm, x.shape(), run));

    norm.norm.backward(x, d_out, of_norm, run);
    if (!gamma) {
        for (const auto numbers : {of_rep.weight, of_rep.bias, of_rep.eta}) std::ranges::fill(numbers, T{0});
        return;
    }
    for (const auto numbers : {of_norm.weight, of_norm.bias})
        for (auto& number : numbers) number = static_cast<T>(*gamma * static_cast<double>(number));
    detail::batch_gradients<T>()(norm.rep.batch, {x, d_out, of_rep, mask, norm.rep.eta, 1 - *gamma, *gamma}, run);
}

} // namespace attn
