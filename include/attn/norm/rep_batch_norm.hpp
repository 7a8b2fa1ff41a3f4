// RepBN: BatchNorm with a learned share of its input, which folds into a BatchNorm.
#pragma once

#include "../simd/unfused.hpp"
#include "batch_norm.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// RepBN: a BatchNorm plus a multiple of its input.
/// For x (batch, heads, tokens, channels), BN as in batch_norm:
///     RepBN(x) = BN(x) + eta x
/// eta: one learned number. Inference and training as in batch_norm; a token that the mask of a training call leaves out gives x + eta x.
/// Inference costs what batch_norm does: the statistics, weight, bias and eta of a channel make one line.
/// Guo et al. 2024, "SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch Normalization".
template <Scalar T>
struct rep_batch_norm {
    using scalar = T;
    static constexpr std::string_view name = "rep_batch_norm";
    static constexpr bool moves_statistics = false, adds_bias = true;

    batch_norm<T> batch = {};
    double eta = 1;

    void check(const shape& x) const { check(name, x); }
    void check_apart(const output_memory& out) const { batch.check_apart(out); }
    void check(std::string_view operation, const shape& x) const {
        check_parameters(operation, x);
        batch.check(operation, x);
    }
    /// Throws attention_error if its parameters do not fit x.
    void check_parameters(std::string_view operation, const shape& x) const {
        batch.check_parameters(operation, x);
        detail::check_number<T>(operation, "eta", eta);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return batch.workspace_bytes(x, concurrency, narrow);
    }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const { batch.forward(x, out, run, eta); }
    using gradients = rep_norm_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t concurrency) const {
        return batch.backward_workspace_bytes(x, concurrency);
    }
    /// The gradient of inference, as that of a batch_norm.
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const rep_norm_gradients<T>& wanted,
                  const execution& run) const {
        batch.backward(x, d_out, wanted, run, eta);
    }
    /// What inference does to channel c.
    channel_map map_of(index_t c) const { return batch.map_of(c, eta); }
};

/// Training of a rep_batch_norm: as of a batch_norm, plus eta x.
template <Scalar T>
void train(const rep_batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
           const std::type_identity_t<tensor_view<T>>& out, batch_norm_statistics& statistics, const detail::call_execution& run = {},
           const token_mask& mask = {}) {
    detail::prepare_training<T>(norm, x, out, statistics, run, mask);
    norm.batch.train(x, out, statistics, run, mask, norm.eta, 0);
}

/// The plain BatchNorm that equals a RepBN with running statistics:
///     weight' = weight + eta sqrt(variance + eps),      bias' = bias + eta mean
/// written to the given memory, (channels) each, which the result refers to beside the statistics of `norm`.
/// Throws attention_error if the sizes differ or the norm has no statistics. SLAB, lemma 4.1.
template <Scalar T>
batch_norm<T> reparameterised(const rep_batch_norm<T>& norm, std::span<T> weight, std::span<T> bias) {
    const auto& from = norm.batch;
    const shape channels{.tokens = 1, .channels = std::ssize(from.mean)};
    if (from.mean.empty())
        detail::raise(argument_error(norm.name, "mean", "is missing: only a norm with running statistics is re-parameterised"));
    norm.check(channels);
    for (const auto& [argument, memory] : {std::pair("weight'", weight), std::pair("bias'", bias)})
        if (memory.size() != from.mean.size())
            detail::raise(shape_error(norm.name, argument, "has ", memory.size(), " entries, but the norm has ", from.mean.size()));
    for (std::size_t c = 0; c < weight.size(); ++c) {
        const auto old_weight = from.weight.empty() ? 1 : static_cast<double>(from.weight[c]),
                   old_bias = from.bias.empty() ? 0 : static_cast<double>(from.bias[c]);
        weight[c] = static_cast<T>(old_weight + simd::unfused(norm.eta * std::sqrt(from.variance[c] + from.eps)));
        bias[c] = static_cast<T>(old_bias + simd::unfused(norm.eta * from.mean[c]));
    }
    auto plain = from;
    plain.weight = weight;
    plain.bias = bias;
    return plain;
}

} // namespace attn
