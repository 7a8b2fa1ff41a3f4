// The operators as most people would write them with Eigen, which only timing needs: a case says which of them it is, and bench/ has them.
#pragma once

#include "attn/core/inputs.hpp"
#include "attn/core/tensor.hpp"
#include "attn/reference/depthwise_convolution.hpp"
#include "attn/reference/recurrent_attention.hpp"

#include <functional>

namespace attn::testing {

/// Changes the scaled scores of one query, absolute position `query`, with all keys; a hidden key becomes -infinity.
template <Scalar T>
using adjust_row = std::function<void(index_t batch, index_t head, index_t query, index_t first_key, T* scores, index_t keys)>;
/// Replaces x by phi(x), for a contiguous matrix of so many numbers.
template <Scalar T>
using map_numbers = std::function<void(T* x, index_t count)>;
/// Whether query row i of a batch entry sees key row j.
using sees_key = std::function<bool(index_t batch, index_t i, index_t j)>;

/// How heads are mixed, and their sinks; what is empty is not there.
struct naive_mixings {
    tensor_view<const double> logits_mix = {};
    std::span<const double> logits_bias = {};
    tensor_view<const double> weights_mix = {};
    std::span<const double> weights_bias = {}, sinks = {};
};

template <Scalar T>
class naive_forms {
public:
    /// An n x m matrix of scores for each head. `adjust` may be empty. sinks: one per head, or none.
    virtual void softmax(const inputs<T>& in, const outputs<T>& out, T scale, const adjust_row<T>& adjust, std::span<const double> sinks) const = 0;
    /// The same, where `weigh` makes weights of the scaled scores of one query, 0 of hidden keys.
    virtual void pointwise(const inputs<T>& in, const outputs<T>& out, T scale, const adjust_row<T>& weigh) const = 0;
    /// matrix (1, 1, rows, tokens or more) times the tokens of every batch entry and head.
    virtual tensor<T> projection(const tensor_view<const T>& matrix, const tensor_view<const T>& tokens) const = 0;
    /// The n x m scores of all heads as the rows of one matrix, so that a mixing is a product. Queries go in pieces only where such a matrix would
    /// fill a gigabyte. `adjust` may be empty; it speaks of mixed heads.
    virtual void talking_heads(const inputs<T>& in, const outputs<T>& out, T scale, const naive_mixings& mixings, const adjust_row<T>& adjust) const = 0;
    /// Three products, phi(q) (phi(k)^T v) and phi(q) z; with `sees`, an n x m matrix of weights instead. eps < 0: not normalised.
    virtual void linear(const inputs<T>& in, const outputs<T>& out, const map_numbers<T>& phi, const sees_key& sees, T eps) const = 0;
    /// A state for each head of keys, token by token: products of a matrix and a vector, and of two vectors.
    virtual void recurrent(const inputs<T>& in, const outputs<T>& out, const reference::recurrent_terms<T>& terms, T scale,
                           const tensor_view<const T>& first_state) const = 0;
    /// out += DWC(in): one product of rows for each token and tap.
    virtual void add_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const reference::grid& grid, const tensor_view<const T>& weights,
                                 std::span<const T> bias) const = 0;

protected:
    ~naive_forms() = default;
};

} // namespace attn::testing
