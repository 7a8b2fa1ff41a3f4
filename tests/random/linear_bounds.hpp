// Bounds of linear attention and of the convolution beside it.
#pragma once

#include "bounds.hpp"

#include <attn/reference/depthwise_convolution.hpp>

namespace attn::fuzz {

/// Linear attention as its formula reads, in all that its rounding depends on.
struct linear_terms {
    std::function<double(double)> feature; ///< none: queries and keys are features
    std::function<std::function<bool(index_t query, index_t key)>(index_t batch, index_t head)> sees;
    bool normalise = true;
    double eps = 0, scale = 1;
    double feature_error = 0; ///< relative, of each feature
    double unit = 0, least = 0;
};

/// Sets the bounds of the values: A_ij = sum_c f(q_i)_c f(k_j)_c is summed with v in one order or the other, each number being a sum of at
/// most m d_k terms made in chains of d_k + m, and is wrong by that many units of the terms' magnitudes at most.
void linear_bounds(const inputs<double>& in, const tensor_view<double>& bounds, const linear_terms& terms);

/// Adds the bounds of a convolution, sum being what it is added to.
void add_convolution_bounds(const tensor_view<const double>& x, const tensor_view<const double>& result, const tensor_view<double>& bounds,
                            const reference::grid& grid, const tensor_view<const double>& weights, std::span<const double> bias,
                            std::span<const index_t> present, double unit);

} // namespace attn::fuzz
