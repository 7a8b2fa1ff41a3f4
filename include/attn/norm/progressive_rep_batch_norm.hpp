// PRepBN: training that begins with one norm and ends with RepBN; and how it moves from one to the other, pure functions of the step.
#pragma once

#include "rep_batch_norm.hpp"

#include <cstdint>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A const callable: the training step (0, 1, ...) -> gamma in [0, 1], the share of the first norm; none during the warm-up, when the
/// first norm runs alone. The step is the whole state: saving a number saves the schedule.
template <class S>
concept GammaSchedule = requires(const S& schedule, std::int64_t step) {
    { schedule(step) } -> std::convertible_to<std::optional<double>>;
};

namespace detail {

/// gamma(t) of the step t = step - warm_up; none during the warm-up, and 0 from t = steps on.
std::optional<double> scheduled(std::int64_t step, std::int64_t warm_up, std::int64_t steps, const auto& gamma) {
    if (step < warm_up) return std::nullopt;
    return step - warm_up >= steps ? 0.0 : gamma(step - warm_up);
}

} // namespace detail

/// A straight line: gamma = from (T - t) / T, T = steps, t = step - warm_up; 0 from t = T on.
struct linear_schedule {
    std::int64_t steps = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        return detail::scheduled(step, warm_up, steps,
                                 [&](std::int64_t t) { return from * static_cast<double>(steps - t) / static_cast<double>(steps); });
    }
};

/// A cosine: gamma = from (1 + cos(pi t / T)) / 2; 0 from t = T on.
struct cosine_schedule {
    std::int64_t steps = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        return detail::scheduled(step, warm_up, steps, [&](std::int64_t t) {
            return from * (1 + std::cos(std::numbers::pi * (static_cast<double>(t) / static_cast<double>(steps)))) / 2;
        });
    }
};

/// A staircase: gamma falls in `stairs` equal stairs of equal length: from (1 - floor(stairs t / T) / stairs); 0 from t = T on.
struct step_schedule {
    std::int64_t steps = 1;
    std::int64_t stairs = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        return detail::scheduled(step, warm_up, steps, [&](std::int64_t t) {
            return from * static_cast<double>(stairs - t * stairs / steps) / static_cast<double>(stairs);
        });
    }
};

/// Counts training steps. `step` is all there is to save and to restore.
struct step_counter {
    std::int64_t step = 0;

    /// The schedule's gamma for this step; the next call is of the next step.
    std::optional<double> next(const GammaSchedule auto& schedule) { return schedule(step++); }
};

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
    static constexpr bool moves_statistics = false;

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
    /// What inference does to channel c.
    channel_map map_of(index_t c) const { return rep.map_of(c); }
};

namespace detail {

/// Enough for either norm, which run one after the other.
template <Norm N>
std::size_t training_bytes(const progressive_rep_batch_norm<N>& norm, const shape& x, index_t concurrency) {
    return std::max(norm.norm.workspace_bytes(x, concurrency, false), training_bytes(norm.rep, x, concurrency));
}

} // namespace detail

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
