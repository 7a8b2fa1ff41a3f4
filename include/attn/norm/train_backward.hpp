// The gradients of training steps: of what `train` computes; and a norm as it is in training, where a layer expects a norm.
#pragma once

#include "progressive_rep_batch_norm.hpp"

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

/// What is checked of the gradient of a training step, and of its norm: for_each(visit) visits the gradients of the parameters.
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
    if (takes_statistics) check_tokens_for_variance(N::name, mask, x.shape());
    norm.check_parameters(N::name, x.shape());
}
/// Visits the gradients of the parameters of a rep_batch_norm.
template <Scalar T>
void visit_rep_parameters(std::string_view operation, std::array<std::string_view, 3> names, const rep_norm_gradients<T>& wanted,
                          index_t channels, const auto& visit) {
    visit_parameters(operation, {names[0], names[1]}, wanted, channels, true, visit);
    visit(names[2], as_row(wanted.eta), shape{.tokens = 1, .channels = 1}, true);
}

/// Bytes of workspace that the gradient of a training step of a norm needs: of a progressive one as for training_bytes.
template <FoldableNorm N>
std::size_t train_backward_bytes(const N& norm, const shape& x, index_t concurrency) {
    const auto bytes = batch_gradients<typename N::scalar>::workspace_bytes(x, concurrency);
    if constexpr (requires { norm.rep; }) return std::max(bytes, norm.norm.backward_workspace_bytes(x, concurrency));
    else return bytes;
}

/// The gradient of a training step of a norm that is a batch_norm plus eta times its input.
template <Scalar T, FoldableNorm N>
void train_backward_of(const N& norm, const batch_norm<T>& batch, double eta, const tensor_view<const T>& x,
                       const tensor_view<const T>& d_out, const rep_norm_gradients<T>& wanted, const execution& run,
                       const token_mask& mask) {
    const auto for_each_parameter = [&](const auto& visit) {
        visit_rep_parameters<T>(N::name, {"wanted.weight", "wanted.bias", "wanted.eta"}, wanted, x.shape().channels, visit);
    };
    check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask);
    run.reserve(N::name, "the gradient for x", x.shape(), train_backward_bytes(norm, x.shape(), run.concurrency()));
    batch_gradients<T>()(batch, {x, d_out, wanted, mask, eta}, run);
}

template <Scalar T>
norm_gradients<T> training_gradients_of(const batch_norm<T>&);
template <Scalar T>
rep_norm_gradients<T> training_gradients_of(const rep_batch_norm<T>&);
template <class N>
progressive_norm_gradients<typename N::scalar> training_gradients_of(const progressive_rep_batch_norm<N>&);

} // namespace detail

/// Bytes of workspace that the gradient of a training step of a norm over tokens of that shape needs with such an executor or execution.
std::size_t train_backward_workspace_bytes(const FoldableNorm auto& norm, const shape& x, const detail::call_execution& run = {}) {
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
    detail::train_backward_of<T>(norm, norm, 0, x, d_out, {wanted, {}}, run, mask);
}

/// The gradient of a training step of a rep_batch_norm, out = BN(x) + eta x, as that of a batch_norm, out = BN(x).
template <Scalar T>
void train_backward(const rep_batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
                    const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<rep_norm_gradients<T>>& wanted,
                    const detail::call_execution& run = {}, const token_mask& mask = {}) {
    detail::train_backward_of<T>(norm, norm.batch, norm.eta, x, d_out, wanted, run, mask);
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
    detail::check_gamma(norm.name, gamma);
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

/// A training step of a batch_norm, rep_batch_norm or progressive_rep_batch_norm, for layers that take any norm: what they call `forward`
/// is `train`, with the statistics of the batch, and their gradient is `train_backward`. Each forward moves the running statistics, which
/// is why two of them must not run at a time. A block trains as transformer_block<in_training<N>, ...>, and is then used as
/// transformer_block<N, ...> with the same weights. gamma is what the schedule of a progressive norm says for this step; other norms know
/// none. See `train`.
template <FoldableNorm N>
struct in_training {
    using scalar = typename N::scalar;
    /// Those of the norm's training step.
    using gradients = decltype(detail::training_gradients_of(std::declval<const N&>()));
    static constexpr std::string_view name = N::name;
    static constexpr bool moves_statistics = true, adds_bias = true;
    static constexpr bool is_progressive = std::same_as<gradients, progressive_norm_gradients<scalar>>;

    N norm;
    batch_norm_statistics* statistics;
    std::optional<double> gamma = {};

    void check(const shape& x) const {
        if (!statistics) detail::raise(argument_error(name, "statistics", "are missing"));
        if (std::ssize(statistics->mean) != x.channels)
            detail::raise(shape_error(name, "statistics", "have ", statistics->mean.size(), " channels, but x has shape ", x));
        norm.check_parameters(name, x);
        if (gamma && !is_progressive) detail::raise(argument_error(name, "gamma", "is given, but only a progressive norm has one"));
        detail::check_gamma(name, gamma);
        if (const auto tokens = x.batch * x.heads * x.tokens; (gamma || !is_progressive) && tokens < 2)
            detail::raise(shape_error(name, "x", "of shape ", x, " has fewer than two tokens, but training needs two for a variance"));
    }
    void check_apart(const output_memory& out) const { norm.check_apart(out); }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool = false) const {
        return detail::training_bytes(norm, x, concurrency);
    }
    void forward(const tensor_view<const scalar>& x, const tensor_view<scalar>& out, const execution& run) const {
        if constexpr (is_progressive) train(norm, x, out, *statistics, gamma, run);
        else train(norm, x, out, *statistics, run);
    }
    std::size_t backward_workspace_bytes(const shape& x, index_t concurrency) const {
        return detail::train_backward_bytes(norm, x, concurrency);
    }
    void backward(const tensor_view<const scalar>& x, const tensor_view<const scalar>& d_out, const gradients& wanted,
                  const execution& run) const {
        if constexpr (is_progressive) train_backward(norm, x, d_out, wanted, gamma, run);
        else train_backward(norm, x, d_out, wanted, run);
    }
};

} // namespace attn
