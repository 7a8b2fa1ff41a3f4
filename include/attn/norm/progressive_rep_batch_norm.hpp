// PRepBN: training that begins with one norm and ends with RepBN.
#pragma once

#include "gamma_schedule.hpp"
#include "rep_batch_norm.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// PRepBN: a norm that training turns into a RepBN, step by step.
/// For x (batch, heads, tokens, channels):
///     training:   out = gamma N(x) + (1 - gamma) RepBN(x),      N a layer_norm or any other norm
///     inference:  out = RepBN(x), always
/// gamma is an argument of the training call, made by a schedule from the step (linear_schedule, cosine_schedule, step_schedule). Without
/// gamma, which is the warm-up, N runs alone, and the running statistics stay as they are. With it both run, even at gamma = 1 and at 0.
/// Guo et al. 2024, "SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch Normalization".
template <Norm N>
struct progressive_rep_batch_norm {
    using scalar = typename N::scalar;
    static constexpr std::string_view name = "progressive_rep_batch_norm";
    static constexpr bool moves_statistics = false, adds_bias = true;

    N norm = {};
    rep_batch_norm<scalar> rep = {};

    void check(const shape& x) const { rep.check(name, x); }
    /// Throws attention_error unless the parameters fit: all that is checked for training, which needs no statistics.
    void check_parameters(std::string_view operation, const shape& x) const {
        rep.check_parameters(operation, x);
        norm.check(x);
    }
    void check_apart(const output_memory& out) const {
        norm.check_apart(out);
        rep.check_apart(out);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return rep.workspace_bytes(x, concurrency, narrow);
    }
    void forward(const stored_view<const scalar>& x, const stored_view<scalar>& out, const execution& run) const {
        rep.forward(x, out, run);
    }
    using gradients = rep_norm_gradients<scalar>;
    std::size_t backward_workspace_bytes(const shape& x, index_t concurrency) const { return rep.backward_workspace_bytes(x, concurrency); }
    /// The gradient of inference: RepBN's.
    void backward(const tensor_view<const scalar>& x, const tensor_view<const scalar>& d_out, const gradients& wanted,
                  const execution& run) const {
        rep.backward(x, d_out, wanted, run);
    }
    /// What inference does to channel c.
    channel_map map_of(index_t c) const { return rep.map_of(c); }
};

/// One training call: out = gamma N(x) + (1 - gamma) RepBN(x) with the statistics of this batch, by which the running `statistics` move;
/// without gamma, out = N(x). Tokens that the mask leaves out are no part of the statistics, and give gamma N(x) + (1 - gamma)(x + eta x).
/// Throws attention_error, before anything is written: as `train` of a batch_norm does, what N refuses, a gamma outside [0, 1].
template <Norm N>
void train(const progressive_rep_batch_norm<N>& norm, const tensor_view<const typename N::scalar>& x,
           const tensor_view<typename N::scalar>& out, batch_norm_statistics& statistics, std::optional<double> gamma,
           const detail::call_execution& run = {}, const token_mask& mask = {}) {
    detail::check_gamma(norm.name, gamma);
    detail::prepare_training<typename N::scalar>(norm, x, out, statistics, run, mask, gamma.has_value());
    norm.norm.forward(x, out, run);
    if (gamma) norm.rep.batch.train(x, out, statistics, run, mask, norm.rep.eta, *gamma);
}

} // namespace attn
