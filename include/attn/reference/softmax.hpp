// The definition of softmax attention: the printed formula, one query at a time.
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

/// A key that a query sees: its row, its score after the score function, and the exponential of that, relative to the largest.
template <class T>
struct seen_key {
    index_t row;
    T score, exponential;
};

/// What `softmax` computes.
template <class T>
void softmax_of_pairs(const inputs<T>& in, const outputs<T>& out, std::optional<double> scale, const of_head<pair_scores<T>>& scores,
                      const of_head<visible_pairs>& pattern, std::span<const double> sinks) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto factor = static_cast<T>(scale.value_or(1 / sqrt(static_cast<double>(d_k))));
    constexpr auto nothing = -std::numeric_limits<T>::infinity();
    std::vector<seen_key<T>> seen;

    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / kv_heads);
            const auto score = scores(b, h);
            const auto visible = pattern(b, h);
            const T sink = sinks.empty() ? nothing : static_cast<T>(sinks[static_cast<std::size_t>(h)]);

            for (index_t row = 0; row < n; ++row) {
                const auto i = in.positions.first_query[b] + row;
                seen.clear();
                for (index_t key = 0; key < m; ++key) {
                    const auto j = in.positions.first_key[b] + key;
                    if (!visible(i, j)) continue;
                    T product = 0;
                    for (index_t c = 0; c < d_k; ++c) product += in.queries(b, h, row, c) * in.keys(b, g, key, c);
                    const T s = score(factor * product, i, j);
                    if (s != nothing) seen.push_back({key, s, 0});
                }

                T largest = sink;
                for (const auto& k : seen) largest = max(largest, k.score);
                T denominator = sink == nothing ? 0 : sink == largest ? 1 : exp(sink - largest); // infinity - infinity is NaN
                for (auto& k : seen) denominator += k.exponential = exp(k.score - largest);

                for (index_t c = 0; c < d_v; ++c) {
                    T sum = 0;
                    for (const auto& k : seen) sum += k.exponential / denominator * in.values(b, g, k.row, c);
                    out.values(b, h, row, c) = sum;
                }
                if (out.log_sum_exp.data()) out.log_sum_exp(b, h, row, 0) = largest + log(denominator);
            }
        }
}

} // namespace detail

/// Softmax attention by its formula, everything in T: with double the reference, with float the textbook that kernels are judged against.
///     s_ij = score(scale * sum_c q[b,h,i,c] k[b,g,j,c], i, j)      g = h / (heads / kv_heads)
///     Z_i  = exp(sink_h) + sum over seen j of exp(s_ij)
///     out[b,h,i,:] = sum over seen j of exp(s_ij) / Z_i * v[b,g,j,:],      log_sum_exp[b,h,i] = log Z_i
/// A key is seen if the pattern says so and its score is not -infinity; what is not seen is never multiplied. A row that sees
/// nothing is zero, with the sink as its log_sum_exp, -infinity without one. A NaN score makes its row NaN, and so does a NaN sink; one of
/// +infinity leaves no weight to the keys.
/// Shapes: as in inputs and outputs. They, the pattern and the score function are taken as checked.
/// scale: 1 / sqrt(d_k) if not given. sinks: none, or one per head. Time O(n m (d_k + d_v)) a head, memory O(m).
/// Vaswani et al. 2017, "Attention Is All You Need"; sinks: OpenAI 2025, gpt-oss.
template <class T, ScoreFunction S = identity_score, Pattern P = dense>
void softmax(const inputs<T>& in, const outputs<T>& out, std::optional<double> scale = {}, const S& score = {}, const P& pattern = {},
             std::span<const double> sinks = {}) {
    detail::softmax_of_pairs<T>(in, out, scale, detail::pair_scores_of<T>(score), detail::visible_pairs_of(pattern), sinks);
}

} // namespace attn::reference
