// How fast the pairs of channels of rotary positions turn, and how that is stretched to longer sequences.
#pragma once

#include "../core/shape.hpp"
#include "../simd/elementary.hpp"
#include "../simd/unfused.hpp"

#include <cmath>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The frequencies of rotary positions: pair p turns by t values[p] at position t, and is multiplied by `magnitude`.
/// Each function makes those of c channels, c / 2 pairs, and throws argument_error if c is odd or negative, or another number is not above
/// 0 and finite. `factor`: how many times longer than in training sequences may be.
struct rotary_frequencies {
    std::vector<double> values; ///< radians a position, one for each pair
    double magnitude = 1;

    /// f_p = base^(-2 p / c). Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    static rotary_frequencies geometric(index_t channels, double base = 10000) {
        check(channels, base, 1);
        rotary_frequencies f;
        for (index_t p = 0; p < channels / 2; ++p)
            f.values.push_back(simd::pow(base, -2.0 * static_cast<double>(p) / static_cast<double>(channels)));
        return f;
    }
    /// f_p / factor: position interpolation. Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    /// Interpolation".
    static rotary_frequencies interpolated(index_t channels, double factor, double base = 10000) {
        check(channels, base, factor);
        auto f = geometric(channels, base);
        for (auto& x : f.values) x /= factor;
        return f;
    }
    /// The geometric frequencies of the base  base factor^(c / (c - 2)): the fastest pair stays, the slowest is interpolated. c is at least
    /// 4. "NTK-aware" scaling, bloc97 2023.
    static rotary_frequencies ntk(index_t channels, double factor, double base = 10000) {
        check(channels, base, factor);
        if (channels < 4) detail::raise(argument_error("rotary_frequencies", "channels", "are ", channels, ", but ntk needs 4 at least"));
        const auto c = static_cast<double>(channels);
        return geometric(channels, base * simd::pow(factor, c / (c - 2)));
    }
    /// YaRN: pairs that turn more than beta_fast times in the training length L stay, those that turn less than beta_slow times are
    /// interpolated, those between are mixed linearly in p:
    ///     r = clamp((p - low) / (high - low), 0, 1),      f_p ((1 - r) + r / factor),      magnitude = 0.1 log(factor) + 1
    /// with low = floor(d(beta_fast)), high = ceil(d(beta_slow)), d(b) = c log(L / (2 pi b)) / (2 log base), within 0 .. c - 1.
    /// Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    static rotary_frequencies yarn(index_t channels, double factor, index_t training_length, double base = 10000, double beta_fast = 32,
                                   double beta_slow = 1) {
        check(channels, base, factor);
        require("training_length", static_cast<double>(training_length));
        require("beta_fast", beta_fast);
        require("beta_slow", beta_slow);
        if (base == 1) detail::raise(argument_error("rotary_frequencies", "base", "is 1: yarn divides by its logarithm"));
        constexpr double two_pi = 6.283185307179586;
        const auto c = static_cast<double>(channels);
        const auto length = static_cast<double>(training_length);
        const auto pair_of = [&](double turns) { return c * simd::log(length / (turns * two_pi)) / (2 * simd::log(base)); };
        const auto low = std::max(std::floor(pair_of(beta_fast)), 0.0);
        auto high = std::min(std::ceil(pair_of(beta_slow)), c - 1);
        if (low == high) high += 0.001;
        auto f = geometric(channels, base);
        for (std::size_t p = 0; p < f.values.size(); ++p) {
            const auto slow = std::clamp((static_cast<double>(p) - low) / (high - low), 0.0, 1.0);
            f.values[p] = simd::unfused(f.values[p] / factor * slow) + simd::unfused(f.values[p] * (1 - slow));
        }
        if (factor > 1) f.magnitude = simd::unfused(0.1 * simd::log(factor)) + 1;
        return f;
    }

private:
    static void require(const char* argument, double number) {
        if (!(number > 0 && std::isfinite(number)))
            detail::raise(argument_error("rotary_frequencies", argument, "is ", number, ", but must be above 0 and finite"));
    }
    static void check(index_t channels, double base, double factor) {
        if (channels < 0 || channels % 2 != 0)
            detail::raise(argument_error("rotary", "channels", "are ", channels, ", but they are turned in pairs"));
        detail::check_shape<double>("rotary", "channels", {.tokens = 1, .channels = channels});
        require("base", base);
        require("factor", factor);
    }
};

} // namespace attn
