// The definition of the gradient of talking-heads attention: the printed formulas, one query at a time.
#pragma once

#include "../core/gradients.hpp"
#include "number.hpp"
#include "talking_heads.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// What `talking_heads_gradients` computes.
template <class T>
void talking_heads_gradients_of_pairs(const inputs<T>& in, const output_gradients<T>& d_out, const mixed_head_gradients<T>& wanted,
                                      tensor_view<const double> logits_mix, std::span<const double> logits_bias,
                                      tensor_view<const double> weights_mix, std::span<const double> weights_bias,
                                      std::optional<double> scale, const of_head<pair_slopes<T>>& slopes_of,
                                      const of_head<visible_pairs>& pattern, std::span<const double> sinks) {
    const auto [batch, query_heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, value_heads, m, d_v] = in.values.shape();
    const auto heads = logits_mix.data() ? logits_mix.shape().tokens : query_heads, out_heads = d_out.values.shape().heads;
    const auto factor = static_cast<T>(scale.value_or(1 / sqrt(static_cast<double>(d_k))));
    constexpr auto nothing = -std::numeric_limits<T>::infinity();

    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &wanted.logits_mix, &wanted.logits_bias, &wanted.weights_mix,
                             &wanted.weights_bias, &wanted.sinks})
        attn::detail::fill_zero(*view);
    const auto all_keys = m;
    const auto numbers = [=](index_t count) { return std::vector<T>(static_cast<std::size_t>(count * all_keys)); };
    const auto of = [=](auto& all, index_t head, index_t key) -> auto& { return all[static_cast<std::size_t>(head * all_keys + key)]; };
    // d matrix[row, column] and d bias[row] grow by what one pair gives them.
    const auto add_to_mixing = [&](const tensor_view<T>& mix, const tensor_view<T>& bias, index_t row, T gradient,
                                   const std::vector<T>& from, index_t key) {
        for (index_t column = 0; mix.data() && column < mix.shape().channels; ++column)
            mix(0, 0, row, column) += gradient * of(from, column, key);
        if (bias.data()) bias(0, row, 0, 0) += gradient;
    };

    for (index_t b = 0; b < batch; ++b)
        for (index_t row = 0; row < n; ++row) {
            const auto i = in.positions.first_query[b] + row;
            auto logits = numbers(query_heads);
            for (index_t a = 0; a < query_heads; ++a)
                for (index_t key = 0; key < m; ++key) {
                    T product = 0;
                    const auto kv = a / (query_heads / in.keys.shape().heads);
                    for (index_t x = 0; x < d_k; ++x) product += in.queries(b, a, row, x) * in.keys(b, kv, key, x);
                    of(logits, a, key) = factor * product;
                }

            auto weights = mixed_heads(logits_mix, logits_bias, logits, m), slopes = numbers(heads);
            std::vector<bool> seen(static_cast<std::size_t>(m)), seen_by(static_cast<std::size_t>(heads * m)); // in any head, and in each
            const auto sees = [&](index_t head, index_t key) { return seen_by[static_cast<std::size_t>(head * all_keys + key)]; };
            std::vector<T> of_sink(static_cast<std::size_t>(heads));
            const auto sink_of = [&](index_t c) { return sinks.empty() ? nothing : static_cast<T>(sinks[static_cast<std::size_t>(c)]); };
            for (index_t c = 0; c < heads; ++c) {
                const T sink = sink_of(c);
                const auto slope = slopes_of(b, c);
                const auto visible = pattern(b, c);
                T largest = sink;
                for (index_t key = 0; key < m; ++key) {
                    const auto j = in.positions.first_key[b] + key;
                    T& x = of(weights, c, key);
                    if (visible(i, j)) {
                        const auto scored = slope(x, i, j);
                        x = scored.value;
                        of(slopes, c, key) = scored.derivative;
                    } else {
                        x = nothing;
                    }
                    if (x != nothing) sees(c, key) = seen[static_cast<std::size_t>(key)] = true;
                    largest = max(largest, x);
                }
                const T share = sink == nothing ? 0 : sink == largest ? 1 : exp(sink - largest); // infinity - infinity is NaN
                T denominator = share;
                for (index_t key = 0; key < m; ++key) {
                    T& x = of(weights, c, key);
                    denominator += x = x == nothing ? 0 : exp(x - largest);
                }
                for (index_t key = 0; denominator != 0 && key < m; ++key) of(weights, c, key) /= denominator;
                of_sink[static_cast<std::size_t>(c)] = share == 0 ? 0 : share / denominator;
            }
            const auto mixed = mixed_heads(weights_mix, weights_bias, weights, m);

            auto of_mixed = numbers(out_heads);
            for (index_t e = 0; e < out_heads; ++e) {
                const auto kv = e / (out_heads / value_heads);
                for (index_t key = 0; key < m; ++key) {
                    if (!seen[static_cast<std::size_t>(key)]) continue;
                    T product = 0;
                    for (index_t x = 0; x < d_v; ++x) product += d_out.values(b, e, row, x) * in.values(b, kv, key, x);
                    of(of_mixed, e, key) = product;
                    for (index_t x = 0; wanted.values.data() && x < d_v; ++x)
                        wanted.values(b, kv, key, x) += of(mixed, e, key) * d_out.values(b, e, row, x);
                    add_to_mixing(wanted.weights_mix, wanted.weights_bias, e, product, weights, key);
                }
            }
            auto of_weights = mixed_heads(weights_mix.transposed(), {}, of_mixed, m);
            for (index_t c = 0; c < heads; ++c) {
                T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, c, row, 0) : T{0}; // dZ - D
                for (index_t key = 0; weights_mix.data() && key < m; ++key)
                    if (sees(c, key)) shift -= of(weights, c, key) * of(of_weights, c, key);
                for (index_t x = 0; !weights_mix.data() && x < d_v; ++x) {
                    T out = 0;
                    for (index_t key = 0; key < m; ++key)
                        if (seen[static_cast<std::size_t>(key)])
                            out += of(weights, c, key) * in.values(b, c / (heads / value_heads), key, x);
                    shift -= d_out.values(b, c, row, x) * out;
                }
                if (wanted.sinks.data() && sink_of(c) != nothing) wanted.sinks(0, c, 0, 0) += of_sink[static_cast<std::size_t>(c)] * shift;
                for (index_t key = 0; key < m; ++key) {
                    T& x = of(of_weights, c, key);
                    x = sees(c, key) ? of(weights, c, key) * (x + shift) * of(slopes, c, key) : 0; // now by the mixed score
                    if (seen[static_cast<std::size_t>(key)]) add_to_mixing(wanted.logits_mix, wanted.logits_bias, c, x, logits, key);
                }
            }
            const auto of_logits = mixed_heads(logits_mix.transposed(), {}, of_weights, m);
            for (index_t a = 0; a < query_heads; ++a)
                for (index_t key = 0; key < m; ++key) {
                    if (!seen[static_cast<std::size_t>(key)]) continue;
                    const auto kv = a / (query_heads / in.keys.shape().heads);
                    const T of_product = factor * of(of_logits, a, key);
                    for (index_t x = 0; wanted.queries.data() && x < d_k; ++x)
                        wanted.queries(b, a, row, x) += of_product * in.keys(b, kv, key, x);
                    for (index_t x = 0; wanted.keys.data() && x < d_k; ++x)
                        wanted.keys(b, kv, key, x) += of_product * in.queries(b, a, row, x);
                }
        }
}

} // namespace detail

/// The gradient of talking-heads attention by its formulas, everything in T: L, P and W as `talking_heads` computes them; then, with given
/// gradients dO of out and dZ of log_sum_exp (0 without memory),
///     dW[e,i,j] = sum_x dO[e,i,x] v[e,j,x]                       dP[c,i,j] = sum_e weights_mix[e,c] dW[e,i,j]
///     D[c,i]    = sum_j P[c,i,j] dP[c,i,j]                       dX[c,i,j] = P[c,i,j] (dP[c,i,j] - D[c,i] + dZ[c,i]) score'
///     dL[a,i,j] = sum_c logits_mix[c,a] dX[c,i,j]
///     dv[j] = sum_i W[i,j] dO[i],        dq[i] = scale sum_j dL[i,j] k[j],        dk[j] = scale sum_i dL[i,j] q[i]
///     d weights_mix[e,c] = sum_ij dW[e,i,j] P[c,i,j],            d weights_bias[e] = sum_ij dW[e,i,j]
///     d logits_mix[c,a]  = sum_ij dX[c,i,j] L[a,i,j],            d logits_bias[c]  = sum_ij dX[c,i,j]
///     d sinks[c] = sum_i exp(sinks[c]) / Z[c,i] (dZ[c,i] - D[c,i])     with Z the denominator of P
/// with D[c,i] = sum_x dO[c,i,x] out[c,i,x], the same number, where weights are not mixed,
/// over the pairs that any mixed head sees, where those that a head does not see have P and dX 0; dk and dv are summed over the heads that
/// share them, those of parameters over the batch. score' is the derivative of the score function by the mixed score. A view without memory
/// is not wanted. Shapes, pattern and score function are taken as checked. Time and memory: some times those of `talking_heads`.
template <class T, ScoreFunction S = identity_score, Pattern P = dense>
void talking_heads_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const mixed_head_gradients<T>& wanted,
                             tensor_view<const double> logits_mix, std::span<const double> logits_bias,
                             tensor_view<const double> weights_mix, std::span<const double> weights_bias, std::optional<double> scale = {},
                             const S& score = {}, const P& pattern = {}, std::span<const double> sinks = {}) {
    detail::talking_heads_gradients_of_pairs<T>(in, d_out, wanted, logits_mix, logits_bias, weights_mix, weights_bias, scale,
                                                detail::pair_slopes_of<T>(score), detail::visible_pairs_of(pattern), sinks);
}

} // namespace attn::reference
