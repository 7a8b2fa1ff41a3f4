// The definition of talking-heads attention: the printed formula, one query at a time.
#pragma once

#include "../core/inputs.hpp"
#include "number.hpp"
#include "pairs.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// to[row, x] = sum_column matrix[row, column] from[column, x] + bias[row], of `count` numbers a head; a copy without a matrix.
template <class T>
std::vector<T> mixed_heads(const tensor_view<const double>& matrix, std::span<const double> bias, const std::vector<T>& from,
                           index_t count) {
    if (!matrix.data()) return from;
    std::vector<T> to(static_cast<std::size_t>(matrix.shape().tokens * count));
    for (index_t row = 0; row < matrix.shape().tokens; ++row)
        for (index_t x = 0; x < count; ++x) {
            T sum = bias.empty() ? T{0} : static_cast<T>(bias[static_cast<std::size_t>(row)]);
            for (index_t column = 0; column < matrix.shape().channels; ++column)
                sum += static_cast<T>(matrix(0, 0, row, column)) * from[static_cast<std::size_t>(column * count + x)];
            to[static_cast<std::size_t>(row * count + x)] = sum;
        }
    return to;
}

/// What `talking_heads` computes.
template <class T>
void talking_heads_of_pairs(const inputs<T>& in, const outputs<T>& out, tensor_view<const double> logits_mix,
                            std::span<const double> logits_bias, tensor_view<const double> weights_mix,
                            std::span<const double> weights_bias, std::optional<double> scale, const of_head<pair_scores<T>>& scores,
                            const of_head<visible_pairs>& pattern, std::span<const double> sinks) {
    const auto [batch, query_heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, value_heads, m, d_v] = in.values.shape();
    const auto heads = logits_mix.data() ? logits_mix.shape().tokens : query_heads, out_heads = out.values.shape().heads;
    const auto factor = static_cast<T>(scale.value_or(1 / sqrt(static_cast<double>(d_k))));
    constexpr auto nothing = -std::numeric_limits<T>::infinity();

    for (index_t b = 0; b < batch; ++b)
        for (index_t row = 0; row < n; ++row) {
            const auto i = in.positions.first_query[b] + row;
            std::vector<T> logits;
            for (index_t a = 0; a < query_heads; ++a)
                for (index_t key = 0; key < m; ++key) {
                    const auto kv = a / (query_heads / in.keys.shape().heads);
                    T product = 0;
                    for (index_t x = 0; x < d_k; ++x) product += in.queries(b, a, row, x) * in.keys(b, kv, key, x);
                    logits.push_back(factor * product);
                }

            auto weights = mixed_heads(logits_mix, logits_bias, logits, m);
            std::vector<bool> seen(static_cast<std::size_t>(m));
            for (index_t c = 0; c < heads; ++c) {
                T* const head = weights.data() + c * m;
                const auto score = scores(b, c);
                const auto visible = pattern(b, c);
                const T sink = sinks.empty() ? nothing : static_cast<T>(sinks[static_cast<std::size_t>(c)]);
                T largest = sink;
                bool sees_any = false;
                for (index_t key = 0; key < m; ++key) {
                    const auto j = in.positions.first_key[b] + key;
                    head[key] = visible(i, j) ? score(head[key], i, j) : nothing;
                    if (head[key] != nothing) sees_any = seen[static_cast<std::size_t>(key)] = true;
                    largest = max(largest, head[key]);
                }
                T denominator = sink == nothing ? 0 : sink == largest ? 1 : exp(sink - largest); // infinity - infinity is NaN
                for (index_t key = 0; key < m; ++key) denominator += head[key] = head[key] == nothing ? 0 : exp(head[key] - largest);
                // A row that sees nothing has weights 0, whatever the sink is. NaN in another reaches all keys, and so the whole row.
                for (index_t key = 0; key < m; ++key)
                    if (sees_any) head[key] /= denominator;
                if (out.log_sum_exp.data()) out.log_sum_exp(b, c, row, 0) = largest + log(denominator);
            }

            weights = mixed_heads(weights_mix, weights_bias, weights, m);
            for (index_t e = 0; e < out_heads; ++e)
                for (index_t x = 0; x < d_v; ++x) {
                    T sum = 0;
                    for (index_t key = 0; key < m; ++key)
                        if (seen[static_cast<std::size_t>(key)])
                            sum += weights[static_cast<std::size_t>(e * m + key)] * in.values(b, e / (out_heads / value_heads), key, x);
                    out.values(b, e, row, x) = sum;
                }
        }
}

} // namespace detail

/// Talking-heads attention by its formula, everything in T: with double the reference, with float the textbook that kernels are judged
/// against.
///     L[b,a,i,j] = scale * sum_x q[b,a,i,x] k[b,a',j,x]                          a in h_k, a' = a / (h_k / kv_heads of k)
///     J[b,c,i,j] = score(sum_a logits_mix[c,a] L[b,a,i,j] + logits_bias[c], i, j)   c in h
///     P[b,c,i,:] = softmax over the keys that the pattern shows to query i in head c and whose J is not -infinity, with sinks[c]
///     W[b,e,i,j] = sum_c weights_mix[e,c] P[b,c,i,j] + weights_bias[e]           e in h_v; for keys seen in any head c, others are left
///     out out[b,e,i,:] = sum_j W[b,e,i,j] v[b,e',j,:],      log_sum_exp[b,c,i] = log of the denominator of P[b,c,i,:]
/// logits_mix: (1, 1, h, h_k), weights_mix: (1, 1, h_v, h), each without memory for no mixing, which leaves its bias out.
/// Shapes, pattern and score function are taken as checked. scale: 1 / sqrt(d_k) if not given. Sinks and biases: none, or one per head.
/// Time O(n m (h_k d_k + h_v d_v + h (h_k + h_v))), memory O(m (h_k + h + h_v)).
/// Shazeer et al. 2020, "Talking-Heads Attention".
template <class T, ScoreFunction S = identity_score, Pattern P = dense>
void talking_heads(const inputs<T>& in, const outputs<T>& out, tensor_view<const double> logits_mix, std::span<const double> logits_bias,
                   tensor_view<const double> weights_mix, std::span<const double> weights_bias, std::optional<double> scale = {},
                   const S& score = {}, const P& pattern = {}, std::span<const double> sinks = {}) {
    detail::talking_heads_of_pairs<T>(in, out, logits_mix, logits_bias, weights_mix, weights_bias, scale, detail::pair_scores_of<T>(score),
                                      detail::visible_pairs_of(pattern), sinks);
}

} // namespace attn::reference
