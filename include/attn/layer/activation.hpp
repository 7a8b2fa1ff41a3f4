// What a feed-forward layer applies to its hidden channels. `relu` is one too.
#pragma once

#include "../attention/feature_map.hpp"

#include <cmath>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A value with one generic call x -> f(x), on numbers and on lanes: what a FeatureMap is.
template <class F>
concept Activation = FeatureMap<F>;

/// GELU: x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, exactly. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
struct gelu {
    template <class S>
    S operator()(S x) const {
        using std::erf;
        return S(0.5) * x * (S(1) + erf(x * S(std::numbers::sqrt2 / 2)));
    }
};

/// GELU by the tanh that approximates it: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. GPT-2's.
struct gelu_tanh {
    template <class S>
    S operator()(S x) const {
        using std::tanh;
        constexpr auto root = 0.79788456080286535588; // sqrt(2 / pi)
        return S(0.5) * x * (S(1) + tanh(S(root) * (x + S(0.044715) * x * x * x)));
    }
};

/// SiLU: x / (1 + e^-x), also called swish. With a gate it makes SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer").
struct silu {
    template <class S>
    S operator()(S x) const {
        using std::abs, std::exp, attn::select;
        const S power = exp(-abs(x)); // of what is not positive: e^-x leaves the range of S where x e^x does not
        return x * (select(x < S(0), power, S(1)) / (S(1) + power));
    }
    /// s (1 + x (1 - s)) with s = 1 / (1 + e^-x), both shares without cancellation.
    template <class S>
    S derivative(S x) const {
        using std::abs, std::exp, attn::select;
        const S power = exp(-abs(x)), smaller = power / (S(1) + power), larger = S(1) / (S(1) + power);
        return select(x < S(0), smaller, larger) * (S(1) + x * select(x < S(0), larger, smaller));
    }
};

} // namespace attn
