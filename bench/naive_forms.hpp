// The operators as most people would write them with Eigen: what speed is judged against.
#pragma once

#include "cases/naive_forms.hpp"

namespace attn::bench {

/// Each is defined, for floats and doubles, in the file of its family.
template <Scalar T>
class eigen_forms final : public testing::naive_forms<T> {
public:
    void softmax(const inputs<T>& in, const outputs<T>& out, T scale, const testing::adjust_row<T>& adjust, std::span<const double> sinks) const override;
    void pointwise(const inputs<T>& in, const outputs<T>& out, T scale, const testing::adjust_row<T>& weigh) const override;
    tensor<T> projection(const tensor_view<const T>& matrix, const tensor_view<const T>& tokens) const override;
    void talking_heads(const inputs<T>& in, const outputs<T>& out, T scale, const testing::naive_mixings& mixings,
                       const testing::adjust_row<T>& adjust) const override;
    void linear(const inputs<T>& in, const outputs<T>& out, const testing::map_numbers<T>& phi, const testing::sees_key& sees, T eps) const override;
    void recurrent(const inputs<T>& in, const outputs<T>& out, const reference::recurrent_terms<T>& terms, T scale,
                   const tensor_view<const T>& first_state) const override;
    void add_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const reference::grid& grid, const tensor_view<const T>& weights,
                         std::span<const T> bias) const override;
};

} // namespace attn::bench
