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
            return from * (1 + simd::cos(std::numbers::pi * (static_cast<double>(t) / static_cast<double>(steps)))) / 2;
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

} // namespace attn
