// Linear attention as most people would write it with Eigen.
#pragma once

#include "attn/core/inputs.hpp"
#include "attn/reference/depthwise_convolution.hpp"

#include <functional>

namespace attn::testing {

/// Replaces x by phi(x), for a contiguous matrix of so many numbers.
template <Scalar T>
using map_numbers = std::function<void(T* x, index_t count)>;
/// Whether query row i of a batch entry sees key row j.
using sees_key = std::function<bool(index_t batch, index_t i, index_t j)>;

/// Three products, phi(q) (phi(k)^T v) and phi(q) z; with `sees`, an n x m matrix of weights instead. eps < 0: not normalised.
template <Scalar T>
void naive_linear(const inputs<T>& in, const outputs<T>& out, const map_numbers<T>& phi, const sees_key& sees, T eps);

/// out += DWC(in): one product of rows for each token and tap.
template <Scalar T>
void add_naive_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const reference::grid& grid,
                           const tensor_view<const T>& weights, std::span<const T> bias);

} // namespace attn::testing
