// A norm as it is in training, where a layer expects a norm.
#pragma once

#include "train_backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T>
norm_gradients<T> training_gradients_of(const batch_norm<T>&);
template <Scalar T>
rep_norm_gradients<T> training_gradients_of(const rep_batch_norm<T>&);
template <class N>
progressive_norm_gradients<typename N::scalar> training_gradients_of(const progressive_rep_batch_norm<N>&);

} // namespace detail

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
        if (!statistics) throw argument_error(name, "statistics", "are missing");
        if (std::ssize(statistics->mean) != x.channels)
            throw shape_error(name, "statistics", "have ", statistics->mean.size(), " channels, but x has shape ", x);
        norm.check_parameters(name, x);
        if (gamma && !is_progressive) throw argument_error(name, "gamma", "is given, but only a progressive norm has one");
        detail::check_gamma(name, gamma);
        if (const auto tokens = x.batch * x.heads * x.tokens; (gamma || !is_progressive) && tokens < 2)
            throw shape_error(name, "x", "of shape ", x, " has fewer than two tokens, but training needs two for a variance");
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
