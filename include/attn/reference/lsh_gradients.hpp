// The definition of the gradient of LSH attention, from the buckets of its tokens.
#pragma once

#include "../core/gradients.hpp"
#include "lsh_attention.hpp"
#include "number.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// The gradient of LSH attention by its formulas, everything in T, given the bucket of every token in every round, which are constants.
/// With u_j = q_j / |q_j|, x_ij, Z_i and out_i as `lsh_attention` has them, dO and dL the given gradients of out and log_sum_exp, over
/// rounds and seen j
///     P_ij = exp(x_ij) / Z_i,      dx_ij = P_ij (sum_c dO[i,c] v[j,c] - sum_c dO[i,c] out[i,c] + dL_i)
///     dv_j = sum P_ij dO_i,        du_j = scale sum dx_ij q_i
///     dq_i = scale sum_j dx_ij u_j + (du_i - u_i sum_c u[i,c] du[i,c]) / |q_i|           without the second part if q_i is 0
/// to.queries and to.values, which may have no memory, are the gradients of q and v; to.keys is not looked at.
template <class T>
void lsh_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& to,
                   const tensor_view<const index_t>& buckets, index_t chunk, bool causal, double scale) {
    const auto& q = in.queries;
    const auto d_k = q.shape().channels, d_v = in.values.shape().channels, n = q.shape().tokens;
    std::vector<T> weights, of_keys(static_cast<std::size_t>(n * d_k)), of_queries(of_keys.size()),
        of_values(static_cast<std::size_t>(n * d_v));
    const auto at = [](std::vector<T>& rows, index_t row, index_t c, index_t channels) -> T& {
        return rows[static_cast<std::size_t>(row * channels + c)];
    };
    detail::for_each_lsh_head(buckets, chunk, causal, [&](index_t b, index_t h, const std::vector<std::vector<index_t>>& seen) {
        for (auto* const sums : {&of_keys, &of_queries, &of_values}) std::ranges::fill(*sums, T{0});
        const auto unit = [&](index_t j, index_t c) { return q(b, h, j, c) / detail::lsh_length(q, b, h, j); };
        for (index_t i = 0; i < n; ++i) {
            const auto& keys = seen[static_cast<std::size_t>(i)];
            weights.clear();
            for (const auto j : keys) weights.push_back(detail::lsh_score(q, b, h, i, j, scale));
            const T largest = *std::ranges::max_element(weights);
            T denominator = 0;
            for (auto& w : weights) denominator += w = exp(w - largest);
            for (auto& w : weights) w /= denominator;
            T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, h, i, 0) : T{0}; // dL - dO . out
            for (index_t c = 0; c < d_v; ++c) {
                T out = 0;
                for (std::size_t e = 0; e < keys.size(); ++e) out += weights[e] * in.values(b, h, keys[e], c);
                shift -= d_out.values(b, h, i, c) * out;
            }
            for (std::size_t e = 0; e < keys.size(); ++e) {
                const auto j = keys[e];
                T product = 0;
                for (index_t c = 0; c < d_v; ++c) product += d_out.values(b, h, i, c) * in.values(b, h, j, c);
                const T of_score = static_cast<T>(scale) * weights[e] * (product + shift);
                for (index_t c = 0; c < d_v; ++c) at(of_values, j, c, d_v) += weights[e] * d_out.values(b, h, i, c);
                for (index_t c = 0; c < d_k; ++c) {
                    at(of_keys, j, c, d_k) += of_score * q(b, h, i, c);
                    at(of_queries, i, c, d_k) += of_score * unit(j, c);
                }
            }
        }
        for (index_t i = 0; i < n; ++i) {
            T along = 0, squares = 0;
            for (index_t c = 0; c < d_k; ++c) {
                along += unit(i, c) * at(of_keys, i, c, d_k);
                squares += q(b, h, i, c) * q(b, h, i, c);
            }
            for (index_t c = 0; to.queries.data() && c < d_k; ++c) {
                const T as_key = squares == 0 ? T{0} : (at(of_keys, i, c, d_k) - unit(i, c) * along) / detail::lsh_length(q, b, h, i);
                to.queries(b, h, i, c) = at(of_queries, i, c, d_k) + as_key;
            }
            for (index_t c = 0; to.values.data() && c < d_v; ++c) to.values(b, h, i, c) = at(of_values, i, c, d_v);
        }
    });
}

} // namespace attn::reference
