// Gates of what an attention makes, before it is projected: see multi_head.
#pragma once

#include "../attention/pointwise_weight.hpp"
#include "../core/heads.hpp"
#include "../simd/exp.hpp"
#include "../simd/wide_sum.hpp"
#include "linear.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// x sigmoid(logits), for x (batch, heads, n, d), heads side by side, and logits (batch, 1, n, heads d), or (batch, 1, n, heads): one for
/// the channels of a head.
template <Scalar T>
class output_gate {
public:
    output_gate(const tensor_view<const T>& logits, const tensor_view<const T>& x, const execution& run)
        : logits_(logits), x_(x), run_(run), width_(logits.shape().channels / std::max<index_t>(1, x.shape().heads)) {}

    /// Throws shape_error unless the linear makes the logits of what an attention makes, of tokens of so many channels.
    static void check(std::string_view operation, const linear<T>& gate, index_t inputs, const shape& x) {
        const auto outputs = gate.outputs(), all = x.heads * x.channels;
        gate.check(operation, "gate", outputs, inputs);
        if (outputs != all && outputs != x.heads)
            detail::raise(shape_error(operation, "gate", "has a weight of shape ", gate.weight.shape(), ", but ", all,
                                      " outputs are needed, or ", x.heads, ", one a head"));
    }

    /// Writes x sigmoid(logits) to `to`, which may be x.
    void forward(const tensor_view<T>& to) const {
        for_each_head(to, [&](index_t b, index_t h, index_t i) {
            const T *const x = x_.row(b, h, i), *const logits = logits_of(logits_, b, h, i);
            T* const row = to.row(b, h, i);
            simd::for_each_register<T>(x_.shape().channels, [&](index_t c, const auto& load, const auto& store) {
                store(load(x + c) * sigmoid{}(each() ? load(logits + c) : lanes(*logits)), row + c);
            });
        });
    }
    /// With d_to, the gradient of what forward wrote, and s = sigmoid(logits):
    ///     d x = d_to s,      d logits = d_to x s (1 - s), summed over the channels of a head that share one
    void backward(const tensor_view<const T>& d_to, const tensor_view<T>& of_x, const tensor_view<T>& of_logits) const {
        for_each_head(of_x, [&](index_t b, index_t h, index_t i) {
            const T *const x = x_.row(b, h, i), *const given = d_to.row(b, h, i), *const logits = logits_of(logits_, b, h, i);
            T *const to = of_x.row(b, h, i), *const to_logits = logits_of(of_logits, b, h, i);
            simd::wide_sum<T> products;
            simd::for_each_part<T>(x_.shape().channels, [&](index_t c, auto part, index_t count) {
                const auto load = [&](const T* from) { return kernel::load_channels<T>(from, 1, c, count); };
                const auto g = load(given), value = load(x), logit = each() ? load(logits) : lanes(*logits);
                (g * sigmoid{}(logit)).store_first(to + c, count);
                if (each()) (g * value * sigmoid{}.derivative(logit)).store_first(to_logits + c, count);
                else products.add(part, g, value);
            });
            if (!each()) (lanes(products.total()) * sigmoid{}.derivative(lanes(*logits))).store_first(to_logits, 1);
        });
    }

private:
    using lanes = simd::lanes<T>;

    /// Whether each channel has a logit.
    bool each() const { return width_ == x_.shape().channels; }
    auto logits_of(const auto& logits, index_t b, index_t h, index_t i) const { return logits.row(b, 0, i) + h * width_; }
    /// Calls f(batch, head, token) for what is to be written.
    void for_each_head(const tensor_view<T>& to, const auto& f) const {
        for_each_row(join_heads(to), run_, [&](T*, index_t b, index_t i) {
            for (index_t h = 0; h < x_.shape().heads; ++h) f(b, h, i);
        });
    }

    tensor_view<const T> logits_, x_;
    const execution& run_;
    index_t width_; ///< logits of a head
};

} // namespace attn::detail
