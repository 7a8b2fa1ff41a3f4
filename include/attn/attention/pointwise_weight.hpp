// Weights of pointwise attention: what becomes of a score.
#pragma once

#include "../core/tensor_view.hpp"
#include "feature_map.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A value with one generic call x -> f(x), on numbers and on lanes: what a FeatureMap is. For its gradient the text is evaluated on dual
/// numbers, or it has a member derivative(x). Optional members:
///   check(operation)  throws attention_error if a parameter is wrong
/// and for parameters that have gradients, those of a score function (see ScoreFunction): gradients<T>, check_gradients, find_gradients and
/// parameter_slope(number, x).
template <class F>
concept PointwiseWeight = FeatureMap<F>;

/// The sigmoid of a score and a bias: 1 / (1 + e^-(x + bias)). bias: about -log of the number of keys, so that a row's weights sum to about
/// 1 at first.
/// Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention".
struct sigmoid {
    double bias = 0;

    template <class S>
    S operator()(S x) const {
        using attn::select;
        const S u = x + static_cast<S>(bias), power = falling(u);
        return select(u < S(0), power, S(1)) / (S(1) + power);
    }
    /// s (1 - s), without cancellation.
    template <class S>
    S derivative(S x) const {
        const S power = falling(x + static_cast<S>(bias)), both = S(1) + power;
        return power / (both * both);
    }
    /// The slope by the bias, which is that by x.
    template <class S>
    S parameter_slope(index_t, S x) const {
        return derivative(x);
    }
    void check(std::string_view operation) const { detail::check_number<float>(operation, "weight.bias", bias); }

    /// The gradient of the bias: (1, 1, 1, 1), summed over all batch entries and heads.
    template <class T>
    struct gradients {
        tensor_view<T> bias = {}; ///< not wanted without memory
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.weight.bias", wanted.bias, shape{1, 1, 1, 1});
    }
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        sums.of_number(0, wanted.bias);
    }

private:
    /// e^-|u|, which is never infinite.
    template <class S>
    static S falling(S u) {
        using std::abs, std::exp;
        const S exponent = -abs(u);
        if constexpr (requires { exp_nonpositive(exponent); }) return exp_nonpositive(exponent); // of lanes, in a third of the time
        else return exp(exponent);
    }
};

/// ReLU divided by a number of keys: max(x, 0) / keys. Wortsman et al. 2023, "Replacing softmax with ReLU in Vision Transformers".
struct relu_over {
    double keys = 1;

    template <class S>
    S operator()(S x) const {
        return relu()(x) * static_cast<S>(1 / keys);
    }
    /// 1 / keys where x > 0, else 0.
    template <class S>
    S derivative(S x) const {
        return relu().derivative(x) * static_cast<S>(1 / keys);
    }
    void check(std::string_view operation) const {
        if (!(keys >= 1 && keys <= 1e37))
            detail::raise(argument_error(operation, "weight.keys", "is ", detail::text_of(keys), ", which is no number of keys"));
    }
};

/// The square of ReLU: max(x, 0)^2. So et al. 2021, "Primer: Searching for Efficient Transformers".
struct squared_relu {
    template <class S>
    S operator()(S x) const {
        const S positive = relu()(x);
        return positive * positive;
    }
    /// 2 max(x, 0).
    template <class S>
    S derivative(S x) const {
        return S(2) * relu()(x);
    }
};

} // namespace attn
