// How a progressive norm moves from one norm to the other while it is trained: pure functions of the step.
#pragma once

#include "../core/scalar.hpp"
#include "../simd/elementary.hpp"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A const callable: the training step (0, 1, ...) -> gamma in [0, 1], the share of the first norm; none during the warm-up, when the
/// first norm runs alone. The step is the whole state: saving a number saves the schedule.
template <class S>
concept GammaSchedule = requires(const S& schedule, std::int64_t step) {
    { schedule(step) } -> std::convertible_to<std::optional<double>>;
};

namespace detail {

/// The part of `steps` that has passed after the warm-up, from 0 to 1; none during the warm-up.
inline std::optional<double> passed(std::int64_t step, std::int64_t warm_up, std::int64_t steps) {
    if (step < warm_up) return std::nullopt;
    const auto t = step - warm_up;
    return t >= steps ? 1.0 : static_cast<double>(t) / static_cast<double>(steps);
}

} // namespace detail

/// A straight line: gamma = from (T - t) / T, T = steps, t = step - warm_up; 0 from t = T on.
struct linear_schedule {
    std::int64_t steps = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        if (step < warm_up) return std::nullopt;
        const auto left = std::max<std::int64_t>(0, steps - (step - warm_up));
        return left == 0 ? 0 : from * static_cast<double>(left) / static_cast<double>(steps);
    }
};

/// A cosine: gamma = from (1 + cos(pi t / T)) / 2; 0 from t = T on.
struct cosine_schedule {
    std::int64_t steps = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        const auto part = detail::passed(step, warm_up, steps);
        if (!part || *part >= 1) return part ? std::optional(0.0) : part;
        return from * (1 + simd::cos(std::numbers::pi * *part)) / 2;
    }
};

/// A staircase: gamma falls in `stairs` equal stairs of equal length: from (1 - floor(stairs t / T) / stairs); 0 from t = T on.
struct step_schedule {
    std::int64_t steps = 1;
    std::int64_t stairs = 1;
    std::int64_t warm_up = 0;
    double from = 1;

    std::optional<double> operator()(std::int64_t step) const {
        if (step < warm_up) return std::nullopt;
        const auto t = step - warm_up;
        return t >= steps ? 0 : from * static_cast<double>(stairs - t * stairs / steps) / static_cast<double>(stairs);
    }
};

/// Counts training steps. `step` is all there is to save and to restore.
struct step_counter {
    std::int64_t step = 0;

    /// The schedule's gamma for this step; the next call is of the next step.
    template <GammaSchedule S>
    std::optional<double> next(const S& schedule) {
        return schedule(step++);
    }
};

} // namespace attn
