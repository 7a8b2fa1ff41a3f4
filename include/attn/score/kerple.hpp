// KERPLE: learned kernels of distance.
#pragma once

#include "../core/borrowed.hpp"
#include "score_function.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// KERPLE of one head: adds -r1 log(1 + r2 |i - j|), or -r1 |i - j|^r2.
template <bool logarithmic>
struct kerple_of_head {
    double r1, r2;

    template <class S>
    S operator()(S score, auto query, auto key) const {
        using std::abs, std::exp, std::fma, std::log;
        const S distance = abs(static_cast<S>(query - key));
        if constexpr (logarithmic) return fma(static_cast<S>(-r1), log(fma(static_cast<S>(r2), distance, S(1))), score);
        else return fma(static_cast<S>(-r1), exp(static_cast<S>(r2) * log(distance)), score); // exp(-infinity) for a distance of 0
    }
    /// The slope of the score by r1 or r2, number 0 or 1.
    template <class S>
    S parameter_slope(index_t number, S, auto query, auto key) const {
        using std::abs, std::exp, std::fma, std::log, attn::select;
        const S distance = abs(static_cast<S>(query - key)), factor = static_cast<S>(-r1);
        if constexpr (logarithmic) {
            const S grown = fma(static_cast<S>(r2), distance, S(1));
            return number == 0 ? S(-log(grown)) : S(factor * distance / grown);
        } else {
            const S power = exp(static_cast<S>(r2) * log(distance));
            return number == 0 ? S(-power) : S(select(distance > S(0), factor * power * log(distance), S(0)));
        }
    }
};

/// Two numbers for each head.
template <bool logarithmic>
struct kerple {
    borrowed<const double> r1, r2;

    kerple_of_head<logarithmic> at(index_t, index_t head) const {
        if (head >= std::ssize(r1) || head >= std::ssize(r2)) [[unlikely]] // workspace_bytes asks before anything is checked
            detail::raise(argument_error(name, "r1", "and r2 have ", r1.size(), " and ", r2.size(), " numbers, none for head ", head));
        return {r1[static_cast<std::size_t>(head)], r2[static_cast<std::size_t>(head)]};
    }
    void check(const score_context& context) const {
        const auto of = [&] {
            return std::string(name) + " with " + std::to_string(r1.size()) + " and " + std::to_string(r2.size()) + " numbers";
        };
        if (std::ssize(r1) != context.heads || std::ssize(r2) != context.heads)
            context.refuse(of(), "needs two for each of ", context.heads, " heads");
        for (std::size_t h = 0; h < r1.size(); ++h) {
            const auto fits = [](double x) { return static_cast<float>(x) > 0 && std::isfinite(static_cast<float>(x)); };
            const bool is_right = fits(r1[h]) && fits(r2[h]) && (logarithmic || r2[h] <= 2);
            if (!is_right)
                context.refuse(of(), "has r1 = ", r1[h], " and r2 = ", r2[h], " for head ", h,
                               (logarithmic ? ": both are above 0" : ": both are above 0, and r2 is at most 2"));
        }
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("r1 of kerple", r1);
        out.require_apart("r2 of kerple", r2);
    }

    /// The gradients of r1 and r2: (1, heads, 1, 1), summed over the batch.
    template <class T>
    struct gradients {
        tensor_view<T> r1 = {}, r2 = {}; ///< not wanted without memory
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.score.r1", wanted.r1, shape{1, std::ssize(r1), 1, 1});
        check("wanted.score.r2", wanted.r2, shape{1, std::ssize(r2), 1, 1});
    }
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        sums.of_number(0, wanted.r1);
        sums.of_number(1, wanted.r2);
    }

private:
    static constexpr const char* name = logarithmic ? "kerple_logarithmic" : "kerple_power";
};

} // namespace detail

/// KERPLE, logarithmic: score - r1[h] log(1 + r2[h] |i - j|).
/// r1, r2: one per head each, views; both above 0, or they are refused. Cost: a logarithm a pair.
/// Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation".
using kerple_logarithmic = detail::kerple<true>;

/// KERPLE, power: score - r1[h] |i - j|^r2[h].
/// r1, r2: one per head each, views; both above 0 and r2 at most 2, or they are refused. Cost: a logarithm and an exponential a pair.
/// Chi et al. 2022, as above.
using kerple_power = detail::kerple<false>;

} // namespace attn
