#pragma once

#include "score_function.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Keeps scores between -cap and cap: cap * tanh(score / cap), close to the score where |score| is much smaller than cap.
/// A cap that is not between 1e-37 and 1e37, where it and its inverse are numbers of either precision, is refused. Cost: one tanh a pair.
/// Bello et al. 2017, "Neural Combinatorial Optimization with Reinforcement Learning" (logit clipping); Gemma Team 2024, Gemma 2.
struct soft_cap {
    static constexpr bool compares_positions = false;
    double cap;

    template <class S>
    S operator()(S score, auto, auto) const {
        using std::tanh;
        // Lanes divide many times slower than they multiply.
        return static_cast<S>(cap) * tanh(score * static_cast<S>(1 / cap));
    }
    /// The slope of the score by the cap: tanh(u) - u (1 - tanh(u)^2), u = score / cap, which is 1 or -1 for an infinite score.
    template <class S>
    S parameter_slope(index_t, S score, auto, auto) const {
        using std::tanh, attn::select;
        const S u = score * static_cast<S>(1 / cap), t = tanh(u), slope = S(1) - t * t;
        return select(slope == S(0), t, t - u * slope);
    }
    void check(const score_context& context) const {
        if (cap >= 1e-37 && cap <= 1e37) return;
        context.refuse("soft_cap{" + detail::text_of(cap) + "}", "needs a cap between 1e-37 and 1e37");
    }

    /// The gradient of the cap: (1, 1, 1, 1), summed over all batch entries and heads.
    template <class T>
    struct gradients {
        tensor_view<T> cap = {}; ///< not wanted without memory
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.score.cap", wanted.cap, shape{1, 1, 1, 1});
    }
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        sums.of_number(0, wanted.cap);
    }
};

} // namespace attn
