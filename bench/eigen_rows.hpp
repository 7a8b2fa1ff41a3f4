// Tensors as Eigen's matrices, for the naive forms.
#pragma once

#include "attn/core/tensor_view.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header, which Eigen includes
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <limits>

namespace attn::bench {

template <Scalar T>
using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Rows [first, first + count) of one head of a tensor as an Eigen matrix (count, channels).
template <class T>
auto rows_of(const tensor_view<T>& t, index_t batch, index_t head, index_t first, index_t count) {
    using plain = matrix<std::remove_const_t<T>>;
    using map = Eigen::Map<std::conditional_t<std::is_const_v<T>, const plain, plain>, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>;
    return map(t.row(batch, head, first), count, t.shape().channels, {t.strides().tokens, t.strides().channels});
}
/// One head of a tensor as an Eigen matrix (tokens, channels).
template <class T>
auto head_of(const tensor_view<T>& t, index_t batch, index_t head) {
    return rows_of(t, batch, head, 0, t.shape().tokens);
}

/// A row's scores become e^(x - top), top the largest. What is so small that it changes no sum is 0: subnormal numbers, which Eigen's
/// exponential of -infinity is one of without AVX-512, take processors many times as long.
template <class Row>
void exponentiate(Row& row, typename Row::Scalar top) {
    using numbers = std::numeric_limits<typename Row::Scalar>;
    row = (row - top).exp();
    row = (row < numbers::min() / numbers::epsilon()).select(typename Row::Scalar{0}, row);
}

} // namespace attn::bench
