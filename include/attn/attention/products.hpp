// Products of bfloat16: attn::softmax_attention{.products = attn::bf16_products{}}, and of a linear.
#pragma once

#include "../kernel/bf16_rows.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Products of bfloat16, summed in float, of tensors of float or 16-bit numbers. bf16 rounds to the nearest bfloat16, of two the even one.
/// Softmax attention:
///     x[i, j] = score(bf16(scale q[i]) . bf16(k[j]), i, j),      w[i, j] = bf16(exp(x[i, j] - m)),      m the largest score so far,
///     out[i]  = sum_j w[i, j] bf16(v[j]) / sum_j w[i, j]
/// Scores, sums and log_sum_exp stay float. A row is divided by the sum of its rounded weights: so it is a mean of the rounded values,
/// nearer to the exact one than by the sum of the weights before they are rounded. A linear:
///     out = bf16(W) bf16(x) + b (+ residual)
/// Numbers beyond 3.39e38 become infinite. All that operator or layer promises holds.
///
/// An operand is rounded by at most 2^-8 of itself. With AVX512-BF16 products take half the time, and a call of many queries about 0.6 of
/// what it takes unrounded; one of few waits for memory, and gains nothing. Other instruction sets compute the same bits, but for sums
/// below 2^-126, which the instruction makes 0; they take longer than unrounded products, and serve to compare. There is no gradient.
struct bf16_products {
    template <Scalar T>
    struct of {
        static_assert(std::same_as<T, float>, "attn: bf16_products are of tensors of float or of 16-bit numbers, not of double");
        using operand = T;
    };
    template <Scalar T>
    using operand = typename of<T>::operand;
};
template <>
struct bf16_products::of<float> {
    using operand = simd::bf16_pair;
};

/// How an operator that computes in T multiplies, chosen as a program runs.
template <Scalar T>
class products_of {
public:
    /// Operands stay as they are.
    constexpr products_of(unrounded_products = {}) {}
    /// Operands are rounded to bfloat16.
    constexpr products_of(bf16_products) : rounded_(sizeof(bf16_products::operand<T>) > 0) {}

    /// Whether operands are rounded to bfloat16.
    constexpr bool rounded() const { return rounded_; }
    /// f(std::type_identity of the operand).
    constexpr auto with_operand(const auto& f) const {
        if constexpr (std::same_as<T, float>)
            if (rounded_) return f(std::type_identity<bf16_products::operand<T>>{});
        return f(std::type_identity<T>{});
    }

private:
    bool rounded_ = false;
};

} // namespace attn
