#pragma once

#include "score_function.hpp"

#include <bit>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// ALiBi of one head.
struct alibi_of_head {
    double slope;

    template <class S>
    S operator()(S score, auto query, auto key) const {
        using std::abs, std::fma;
        // Lanes take the absolute value of scores in one instruction, of positions one by one.
        return fma(static_cast<S>(-slope), abs(static_cast<S>(query - key)), score);
    }
    template <class S>
    S parameter_slope(index_t, S, auto query, auto key) const {
        using std::abs;
        return -abs(static_cast<S>(query - key));
    }
};

} // namespace detail

/// Attention with linear biases: score - slopes[h] * |i - j| for head h.
/// slopes: one per head; a view, so what it refers to outlives the attention operator. Another count than heads is refused, and a slope
/// that is not finite as a float.
/// Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation".
struct alibi {
    borrowed<const double> slopes;

    /// ALiBi with the given slopes, one per head.
    constexpr alibi(borrowed<const double> one_per_head) : slopes(one_per_head) {}

    detail::alibi_of_head at(index_t, index_t head) const {
        if (head >= std::ssize(slopes)) [[unlikely]] // workspace_bytes asks before anything is checked
            detail::raise(argument_error("alibi", "slopes", "are ", slopes.size(), ", none for head ", head));
        return {slopes[static_cast<std::size_t>(head)]};
    }
    void check(const score_context& context) const {
        if (std::ssize(slopes) != context.heads)
            context.refuse("alibi with " + std::to_string(slopes.size()) + " slopes", "needs one for each of ", context.heads, " heads");
        for (std::size_t h = 0; h < slopes.size(); ++h)
            if (!std::isfinite(static_cast<float>(slopes[h])))
                context.refuse("alibi", "has the slope ", detail::text_of(slopes[h]), " for head ", h, ", which is no number of float");
    }
    void check_apart(const output_memory& out) const { out.require_apart("the slopes of alibi", slopes); }

    /// The gradient of the slopes: (1, heads, 1, 1), summed over the batch.
    template <class T>
    struct gradients {
        tensor_view<T> slopes = {}; ///< not wanted without memory
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.score.slopes", wanted.slopes, shape{1, std::ssize(slopes), 1, 1});
    }
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        sums.of_number(0, wanted.slopes);
    }
};

/// The paper's slopes, one per head. A power of two of heads: 2^(-8/heads), its square, its cube, ..., 2^-8. Otherwise those of the
/// power of two below, and for the heads beyond it every other one of the power of two above, from its first.
inline std::vector<double> alibi_slopes(index_t heads) {
    detail::check_shape<double>("alibi_slopes", "heads", {.tokens = 1, .channels = heads});
    std::vector<double> slopes;
    slopes.reserve(static_cast<std::size_t>(heads));
    const auto below = static_cast<index_t>(std::bit_floor(static_cast<std::size_t>(heads)));
    // 2^(-8 k / of), of a power of two: the product of some of the roots 2^-8, 2^-4, 2^-2, ..., each the square root of the one before.
    const auto slope = [](index_t k, index_t of) {
        double product = 1, root = 0x1p-8;
        for (auto left = of; left > 0; left /= 2, root = std::sqrt(root))
            if (k & left) product *= root;
        return product;
    };
    for (index_t h = 0; h < below; ++h) slopes.push_back(slope(h + 1, below));
    for (index_t h = 0; h < heads - below; ++h) slopes.push_back(slope(2 * h + 1, 2 * below));
    return slopes;
}

} // namespace attn
