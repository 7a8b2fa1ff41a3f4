// Projections that are drawn, and what defines them.
#pragma once

#include "draw.hpp"

#include <attn/attention/pooling.hpp>
#include <attn/attention/projection.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/reference/number.hpp>
#include <attn/reference/projections.hpp>

#include <array>

namespace attn::fuzz {

/// A projection's parameters.
template <Scalar T>
struct drawn_projection {
    tensor<T> weights, bias; ///< bias: without memory for none
    index_t projected = 0;

    tensor_view<const T> bias_view() const { return bias.data() ? bias.view() : tensor_view<const T>(); }
    template <class P>
    P as() const {
        return {weights.view(), bias_view()};
    }
};

/// What projects.
enum class projected_by { matrix, mean, largest, channels, mixing };

/// The definitions: the projected rows.
template <class U, class W>
reference::projected_tokens<U> define(projected_by how, index_t projected, const tensor_view<const W>& w, const tensor_view<const W>& b,
                                      const reference::tokens<U>& x) {
    switch (how) {
    case projected_by::matrix:
        return reference::linear_projection(x, w, b);
    case projected_by::mean:
        return reference::mean_pooling(x, projected);
    case projected_by::largest:
        return reference::max_pooling(x, projected);
    case projected_by::channels:
        return reference::channel_convolution(x, w, b);
    default:
        return reference::mixing_convolution(x, w, b);
    }
}
template <class U, Scalar T>
reference::projected_tokens<U> define(projected_by how, const drawn_projection<T>& d, const reference::tokens<U>& x) {
    return define<U, T>(how, d.projected, d.weights.view(), d.bias_view(), x);
}
/// Adds the gradients of tokens and of the parameters, weights and bias.
template <class U, Scalar T>
void define_gradients(projected_by how, const drawn_projection<T>& d, const reference::tokens<U>& x, const reference::projected_tokens<U>& given,
                      const tensor_view<U>& of_x, const std::array<tensor_view<U>, 2>& wanted) {
    switch (how) {
    case projected_by::matrix:
        return reference::linear_projection_gradients(x, given, of_x, d.weights.view(), wanted[0], wanted[1]);
    case projected_by::mean:
        return reference::mean_pooling_gradients(x, given, of_x);
    case projected_by::largest:
        return reference::max_pooling_gradients(x, given, of_x);
    case projected_by::channels:
        return reference::channel_convolution_gradients(x, given, of_x, d.weights.view(), wanted[0], wanted[1]);
    default:
        return reference::mixing_convolution_gradients(x, given, of_x, d.weights.view(), wanted[0], wanted[1]);
    }
}

} // namespace attn::fuzz
