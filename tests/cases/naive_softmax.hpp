// Softmax attention as most people would write it with Eigen: an n x m matrix of scores for each head.
#pragma once

#include "attn/core/inputs.hpp"
#include "attn/core/tensor.hpp"

#include <functional>

namespace attn::testing {

/// Changes the scaled scores of one query, absolute position `query`, with all keys; a hidden key becomes -infinity.
template <Scalar T>
using adjust_row = std::function<void(index_t batch, index_t head, index_t query, index_t first_key, T* scores, index_t keys)>;

/// `adjust` may be empty. sinks: one per head, or none.
template <Scalar T>
void naive_softmax(const inputs<T>& in, const outputs<T>& out, T scale, const adjust_row<T>& adjust, std::span<const double> sinks);

/// matrix (1, 1, rows, tokens or more) times the tokens of every batch entry and head.
template <Scalar T>
tensor<T> naive_projection(const tensor_view<const T>& matrix, const tensor_view<const T>& tokens);

} // namespace attn::testing
