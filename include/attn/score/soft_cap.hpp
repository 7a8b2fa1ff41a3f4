#pragma once

#include "score_function.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Keeps scores between -cap and cap: cap * tanh(score / cap), close to the score where |score| is much smaller than cap.
/// A cap that is not a positive finite number is refused. Cost: one tanh a pair.
/// Bello et al. 2017, "Neural Combinatorial Optimization with Reinforcement Learning" (logit clipping); Gemma Team 2024, Gemma 2.
struct soft_cap {
    double cap;

    template <class S>
    S operator()(S score, auto, auto) const {
        using std::tanh;
        // Lanes divide many times slower than they multiply.
        return static_cast<S>(cap) * tanh(score * static_cast<S>(1 / cap));
    }
    void check(const score_context& context) const {
        if (!(cap > 0 && std::isfinite(cap))) context.refuse("soft_cap{" + std::to_string(cap) + "}", "needs a positive finite cap");
    }
};

} // namespace attn
