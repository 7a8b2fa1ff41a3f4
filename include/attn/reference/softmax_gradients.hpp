// The definition of the gradient of softmax attention: the printed formulas, one query at a time.
#pragma once

#include "../core/gradients.hpp"
#include "number.hpp"
#include "softmax.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// What the gradient of a pair's score is given to.
template <class T>
using pair_gradients = std::function<void(index_t b, index_t h, index_t i, index_t j, const T& x, const T& dx)>;

/// What `softmax_gradients` computes.
template <class T>
void softmax_gradients_of_pairs(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& wanted,
                                const tensor_view<T>& of_sinks, std::optional<double> scale, const of_head<pair_slopes<T>>& slopes,
                                const of_head<visible_pairs>& pattern, std::span<const double> sinks, const pair_gradients<T>& of_score) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto factor = static_cast<T>(scale.value_or(1 / sqrt(static_cast<double>(d_k))));
    constexpr auto nothing = -std::numeric_limits<T>::infinity();
    struct pair {
        index_t row;
        T product, score, slope, weight;
    };
    std::vector<pair> seen;

    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &of_sinks}) attn::detail::fill_zero(*view);

    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / kv_heads);
            const auto slope = slopes(b, h);
            const auto visible = pattern(b, h);
            const T sink = sinks.empty() ? nothing : static_cast<T>(sinks[static_cast<std::size_t>(h)]);

            for (index_t row = 0; row < n; ++row) {
                const auto i = in.positions.first_query[b] + row;
                seen.clear();
                T largest = sink;
                for (index_t key = 0; key < m; ++key) {
                    const auto j = in.positions.first_key[b] + key;
                    if (!visible(i, j)) continue;
                    T product = 0;
                    for (index_t c = 0; c < d_k; ++c) product += in.queries(b, h, row, c) * in.keys(b, g, key, c);
                    const auto s = slope(factor * product, i, j);
                    if (s.value == nothing) continue;
                    seen.push_back({key, factor * product, s.value, s.derivative, 0});
                    largest = max(largest, s.value);
                }
                const T of_sink = sink == nothing ? 0 : sink == largest ? 1 : exp(sink - largest); // infinity - infinity is NaN
                T denominator = of_sink;
                for (auto& p : seen) denominator += p.weight = exp(p.score - largest);
                for (auto& p : seen) p.weight /= denominator;

                T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, h, row, 0) : T{0}; // dL - D
                for (index_t c = 0; c < d_v; ++c) {
                    T out = 0;
                    for (const auto& p : seen) out += p.weight * in.values(b, g, p.row, c);
                    shift -= d_out.values(b, h, row, c) * out;
                }
                if (of_sinks.data() && sink != nothing) of_sinks(0, h, 0, 0) += of_sink / denominator * shift;
                for (const auto& p : seen) {
                    T product = 0;
                    for (index_t c = 0; c < d_v; ++c) product += d_out.values(b, h, row, c) * in.values(b, g, p.row, c);
                    const T of_this = p.weight * (product + shift), of_product = factor * p.slope * of_this;
                    if (of_score) of_score(b, h, i, in.positions.first_key[b] + p.row, p.product, of_this);
                    for (index_t c = 0; wanted.values.data() && c < d_v; ++c)
                        wanted.values(b, g, p.row, c) += p.weight * d_out.values(b, h, row, c);
                    for (index_t c = 0; wanted.keys.data() && c < d_k; ++c)
                        wanted.keys(b, g, p.row, c) += of_product * in.queries(b, h, row, c);
                    for (index_t c = 0; wanted.queries.data() && c < d_k; ++c)
                        wanted.queries(b, h, row, c) += of_product * in.keys(b, g, p.row, c);
                }
            }
        }
}

} // namespace detail

/// The gradient of softmax attention by its formulas, everything in T: what `softmax` computes is s_ij, Z_i and out_i; then, with given
/// gradients dO of out and dL of log_sum_exp (0 without memory),
///     P_ij = exp(s_ij) / Z_i,      D_i = sum_c dO[i,c] out[i,c]
///     dv_j = sum_i P_ij dO_i,      dx_ij = P_ij (sum_c dO[i,c] v[j,c] - D_i + dL_i) score'(x_ij)
///     dq_i = scale sum_j dx_ij k_j,      dk_j = scale sum_i dx_ij q_i,      dsink_h = sum_i exp(sink_h) / Z_i (dL_i - D_i)
/// over the pairs that are seen, with dk and dv summed over the query heads that share them, and dsink over the batch. score' is the
/// derivative of the score function, by its text on dual numbers, or what its member `derivative` says. A view without memory is not
/// wanted. of_sinks: (1, heads, 1, 1). of_score(b, h, i, j, x, dx) is called for each pair, with positions, the scaled product x and the
/// gradient by what the score function makes of it, P_ij (sum_c dO[i,c] v[j,c] - D_i + dL_i): what gradients of its parameters are made of.
/// Shapes, pattern and score function are taken as checked.
template <class T, ScoreFunction S = identity_score, Pattern P = dense>
void softmax_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& wanted,
                       const tensor_view<T>& of_sinks = {}, std::optional<double> scale = {}, const S& score = {}, const P& pattern = {},
                       std::span<const double> sinks = {}, const detail::pair_gradients<T>& of_score = {}) {
    detail::softmax_gradients_of_pairs<T>(in, d_out, wanted, of_sinks, scale, detail::pair_slopes_of<T>(score),
                                          detail::visible_pairs_of(pattern), sinks, of_score);
}

} // namespace attn::reference
