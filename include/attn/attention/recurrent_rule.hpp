// Rules by which a recurrent state takes a token: how it decays, what it forgets, and what it is corrected by.
#pragma once

#include "../core/tensor.hpp"
#include "../kernel/recurrent/attention.hpp"
#include "../simd/elementary.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The rules of recurrent_attention. Each says how a state S (d_k, d_v) takes a token with key k and value v. They refer to numbers of each
/// token and kv head, of which a batch or heads of 1 are for all: log_decay, 0 or less, (batch, kv_heads, n, 1), one number a head, or (..,
/// n, d_k), one for each channel of the keys; beta (batch, kv_heads, n, 1), from 0 to 2.
namespace rule {

/// S = S + k v^T: linear attention without features and without a denominator. Katharopoulos et al. 2020.
template <Scalar U = float>
struct linear {
    using scalar = U;
    kernel::recurrent_terms<U> terms() const { return {}; }
};

/// S = e^g S + k v^T, with g = log_decay: RetNet's retention and Lightning Attention (a constant of each head), Mamba-2's SSD (one number a
/// head: g = -softplus(dt) e^A, the values times dt), GLA (one for each channel). Dao and Gu 2024, "Transformers are SSMs"; Yang et al.
/// 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training".
template <Scalar U = float>
struct gated {
    using scalar = U;
    tensor_view<const U> log_decay;
    kernel::recurrent_terms<U> terms() const { return {.log_decay = log_decay}; }
};

/// S = S + beta k (v - S^T k)^T: the delta rule, which replaces what the state has for a key. Keys of length 1 are wanted. Yang et al.
/// 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
template <Scalar U = float>
struct delta {
    using scalar = U;
    tensor_view<const U> beta;
    kernel::recurrent_terms<U> terms() const { return {.beta = beta}; }
};

/// S = e^g S + beta k (v - (e^g S)^T k)^T: Gated DeltaNet, and Kimi's delta rule with a decay for each channel. Yang et al. 2025, "Gated
/// Delta Networks: Improving Mamba2 with Delta Rule"; Kimi Team 2025, "Kimi Linear".
template <Scalar U = float>
struct gated_delta {
    using scalar = U;
    tensor_view<const U> log_decay, beta;
    kernel::recurrent_terms<U> terms() const { return {.log_decay = log_decay, .beta = beta}; }
};

/// S = (diag(e^g) - a b^T) S + k v^T with vectors a and b (batch, kv_heads, n, d_k) of each token: RWKV-7, whose b is the
/// normalised removal key, and a that times the learning rate in each channel. Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic
/// State Evolution".
template <Scalar U = float>
struct general {
    using scalar = U;
    tensor_view<const U> log_decay, a, b;
    kernel::recurrent_terms<U> terms() const { return {.log_decay = log_decay, .erase = a, .read = b}; }
};

/// Deduces a rule's scalar type from a tensor or view of its numbers.
template <TensorLike G>
gated(const G&) -> gated<detail::scalar_t<G>>;
/// Deduces a rule's scalar type from a tensor or view of its numbers.
template <TensorLike B>
delta(const B&) -> delta<detail::scalar_t<B>>;
/// Deduces a rule's scalar type from a tensor or view of its numbers.
template <TensorLike G, TensorLike B>
gated_delta(const G&, const B&) -> gated_delta<detail::scalar_t<G>>;
/// Deduces a rule's scalar type from a tensor or view of its numbers.
template <TensorLike G, TensorLike A, TensorLike B>
general(const G&, const A&, const B&) -> general<detail::scalar_t<G>>;

} // namespace rule

/// The log decays of retention, constants of each head h, for gated: log(1 - 2^(-5 - h)), of shape (1, heads, tokens, 1). Sun et al. 2023,
/// "Retentive Network: A Successor to Transformer for Large Language Models". Throws shape_error if no tensor has that shape.
template <Scalar T>
[[nodiscard]] tensor<T> retention_log_decays(index_t heads, index_t tokens) {
    tensor<T> decays({1, heads, tokens, 1});
    for (index_t h = 0; h < heads; ++h)
        std::fill_n(decays.data() + h * tokens, tokens, static_cast<T>(simd::log1p(-simd::pow(2.0, static_cast<double>(-5 - h)))));
    return decays;
}

} // namespace attn
