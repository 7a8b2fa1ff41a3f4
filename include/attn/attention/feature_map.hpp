// Feature maps of linear attention: the weight of key j for query i is phi(q_i) . phi(k_j).
#pragma once

#include "../score/score_function.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A value with one generic call x -> phi(x), applied to each channel of queries and keys:
///     []<class S>(S x) { return x * x; }
/// One text is evaluated on numbers by the reference and on lanes by the kernel. What it returns must convert to the type of x. As with
/// score functions, abs, exp, log, max, min, sqrt and tanh are found unqualified on lanes, on numbers after `using std::abs;`, and `using
/// attn::select; select(x > 0, a, b)` chooses. With a map that is never negative, denominators never vanish.
/// A map of one instruction with phi(phi(x)) = phi(x) may say so, `static constexpr bool idempotent = true`: the kernel then applies it
/// wherever it reads queries and keys, instead of writing features first.
template <class F>
concept FeatureMap = std::copy_constructible<F> && requires(const F& phi, double x) {
    { phi(x) } -> std::convertible_to<double>;
};

/// A map from a token's channels x, of one head, and its position to features, for the weights phi(q_i) . phi(k_j) of linear_attention.
/// - `features(channels)`: how many a vector of so many channels has.
/// - `operator()(x, position, to)`: writes the features, of spans of one type of numbers, float or double, or the reference's own.
/// - `gradient(x, position, of_features, to)`: writes the gradient of x, given that of the features.
/// Both are called by several threads at a time. Optional: `check(operation, channels)`, which throws attention_error if a parameter does
/// not fit, and `check_apart(out)`. The kernel calls what is given, so bits are the same everywhere if these texts' are: by fma as it is
/// written, and attn::simd's exp, cos and so on.
template <class F>
concept VectorFeatureMap =
    std::copy_constructible<F> && requires(const F& phi, std::span<const double> x, index_t position, std::span<double> to) {
        { phi.features(index_t{}) } -> std::convertible_to<index_t>;
        phi(x, position, to);
        phi.gradient(x, position, x, to);
    };

/// The features x themselves: weights are plain products, which may be negative, so that a denominator would make no sense.
struct identity_features {
    static constexpr bool idempotent = true;
    constexpr auto operator()(auto x) const { return x; }
};

/// ReLU: max(x, 0). NaN stays NaN.
struct relu {
    static constexpr bool idempotent = true;
    template <class S>
    constexpr S operator()(S x) const {
        using attn::select;
        if constexpr (requires { max_or_second(x, x); }) return max_or_second(S(0), x); // one instruction, of lanes
        else return select(x < S(0), S(0), x);
    }
    /// The slope of ReLU, 0 at 0.
    template <class S>
    constexpr S derivative(S x) const {
        using attn::select;
        return select(x > S(0), S(1), S(0));
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

/// ELU plus one: x + 1 for positive x, else e^x: positive everywhere. Katharopoulos et al. 2020, "Transformers are RNNs".
struct elu_plus_one {
    template <class S>
    S operator()(S x) const {
        using attn::select;
        using std::exp;
        return select(x > S(0), x + S(1), exp(x));
    }
};

} // namespace attn
