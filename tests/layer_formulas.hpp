// Activations and positions by their formulas, in double.
#pragma once

#include <attn/core/tensor.hpp>

#include <cmath>

namespace attn::testing {

inline double plain_gelu(double x) { return x / 2 * std::erfc(-x / std::sqrt(2.0)); }
inline double plain_silu(double x) { return x / (1 + std::exp(-x)); }
inline double plain_relu(double x) { return std::max(x, 0.0); }

/// Positions of rows 0, 1, ... by the formula: the first `channels` of each head are turned.
inline void plain_rotary(tensor<double>& t, index_t channels, bool interleaved, index_t first = 0) {
    const auto& s = t.shape();
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t p = 0; p < channels / 2; ++p) {
                    const auto angle =
                        static_cast<double>(first + i) * std::pow(10000.0, -2.0 * static_cast<double>(p) / static_cast<double>(channels));
                    auto &a = t(b, h, i, interleaved ? 2 * p : p), &c = t(b, h, i, interleaved ? 2 * p + 1 : p + channels / 2);
                    const auto turned = a * std::cos(angle) - c * std::sin(angle);
                    c = a * std::sin(angle) + c * std::cos(angle);
                    a = turned;
                }
}
} // namespace attn::testing
