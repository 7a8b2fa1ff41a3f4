// Eigen matrices as tensor views of one head: rows are tokens, columns are channels.
#pragma once

#include "storage.hpp"
#include "tensor_view.hpp"

#include <Eigen/Core>

#if !EIGEN_VERSION_AT_LEAST(3, 4, 0)
#error "attn needs Eigen 3.4.0 or later"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A matrix, Map, Block or Ref with memory of its own, of any storage order, of float, double or 16-bit numbers.
template <class M>
concept EigenMatrix = std::derived_from<std::remove_cvref_t<M>, Eigen::DenseBase<std::remove_cvref_t<M>>> &&
                      Storage<typename std::remove_cvref_t<M>::Scalar> && requires(M& m) {
                          m.data();
                          m.rowStride();
                          m.colStride();
                      };

/// Views a matrix (tokens, channels) as a tensor (1, 1, tokens, channels).
auto view(EigenMatrix auto& m) {
    return tensor_view(m.data(), shape{.tokens = m.rows(), .channels = m.cols()}, strides{0, 0, m.rowStride(), m.colStride()});
}

/// There is none of anything else, which is said in one sentence.
template <class V>
    requires(!EigenMatrix<V>)
auto view(V&) {
    static_assert(std::is_void_v<V>,
                  "attn: view(m) is of an Eigen matrix with memory, of float, double or 16-bit numbers; a tensor t has t.view()");
    return tensor_view<float>();
}

} // namespace attn
