// The definition of LSH attention and its gradient, from the buckets of its tokens.
#pragma once

#include "../core/gradients.hpp"
#include "number.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// Calls f(b, h, seen) for every batch entry and head, where seen[i] are the tokens that token i sees, in the order of rounds and keys: the
/// others of its bucket in its chunk and the one before, or itself in all rounds.
void for_each_lsh_head(const tensor_view<const index_t>& buckets, index_t chunk, bool causal, const auto& f) {
    const auto [batch, heads, n, rounds] = buckets.shape();
    std::vector<index_t> order(static_cast<std::size_t>(n)), place(order.size());
    std::vector<std::vector<index_t>> seen(order.size());
    const auto at = [](index_t i) { return static_cast<std::size_t>(i); };
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            for (auto& keys : seen) keys.clear();
            for (index_t round = 0; round < rounds; ++round) {
                const auto bucket = [&](index_t i) { return buckets(b, h, i, round); };
                std::iota(order.begin(), order.end(), index_t{0});
                std::ranges::sort(order, {}, [&](index_t i) { return std::pair(bucket(i), i); });
                for (index_t s = 0; s < n; ++s) place[at(order[at(s)])] = s;
                for (index_t i = 0; i < n; ++i)
                    for (index_t j = 0; j < n; ++j) {
                        const auto chunks = place[at(i)] / chunk - place[at(j)] / chunk;
                        if (bucket(i) == bucket(j) && (chunks == 0 || chunks == 1) && j != i && (!causal || j < i))
                            seen[at(i)].push_back(j);
                    }
            }
            for (index_t i = 0; i < n; ++i)
                if (seen[at(i)].empty()) seen[at(i)].assign(at(rounds), i);
            f(b, h, seen);
        }
}

/// The length by which a token is divided to be a key; 1 for zeros.
template <class T>
T lsh_length(const stored_view<const T>& q, index_t b, index_t h, index_t j) {
    const auto squares = sum_over<T>(q.shape().channels, [&](index_t c) { return q(b, h, j, c) * q(b, h, j, c); });
    return squares == 0 ? T{1} : sqrt(squares);
}
/// The weights of some keys of a query, and the logarithm of their denominator.
template <class T>
struct lsh_weights {
    std::vector<T> of_keys;
    T log_sum_exp;

    lsh_weights(const stored_view<const T>& q, index_t b, index_t h, index_t i, const std::vector<index_t>& keys, double scale) {
        for (const auto j : keys) {
            const T length = lsh_length(q, b, h, j);
            const auto term = [&](index_t c) { return q(b, h, i, c) * (q(b, h, j, c) / length); };
            of_keys.push_back(static_cast<T>(scale) * sum_over<T>(q.shape().channels, term));
        }
        const T largest = *std::ranges::max_element(of_keys);
        T denominator = 0;
        for (auto& w : of_keys) denominator += w = exp(w - largest);
        for (auto& w : of_keys) w /= denominator;
        log_sum_exp = largest + log(denominator);
    }
    /// What they make of a channel of the keys' values.
    T of_values(const stored_view<const T>& v, index_t b, index_t h, const std::vector<index_t>& keys, index_t c) const {
        auto weight = of_keys.begin();
        return sum_over<T>(keys, [&](index_t j) { return *weight++ * v(b, h, j, c); });
    }
};

} // namespace detail

/// LSH attention by its formula, everything in T, given the bucket of every token in every round, (batch, heads, n, rounds). Tokens sorted
/// by (bucket, position) are cut into chunks; a token sees the others of its bucket in its chunk and the one before, only earlier ones if
/// causal:
///     x_ij = scale * sum_c q[i,c] q[j,c] / |q_j|,   out_i = sum over rounds and seen j of exp(x_ij) v_j / Z_i,   log_sum_exp_i = log Z_i
/// A token that sees none in any round sees itself in all. Time O(rounds n^2) a head. Shapes as in inputs and outputs, taken as checked.
/// Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer".
template <class T>
void lsh_attention(const inputs<T>& in, const outputs<T>& out, const tensor_view<const index_t>& buckets, index_t chunk, bool causal,
                   double scale) {
    const auto d_v = in.values.shape().channels;
    detail::for_each_lsh_head(buckets, chunk, causal, [&](index_t b, index_t h, const std::vector<std::vector<index_t>>& seen) {
        for (index_t i = 0; i < std::ssize(seen); ++i) {
            const auto& keys = seen[static_cast<std::size_t>(i)];
            const detail::lsh_weights<T> weights(in.queries, b, h, i, keys, scale);
            for (index_t c = 0; c < d_v; ++c) out.values(b, h, i, c) = weights.of_values(in.values, b, h, keys, c);
            if (out.log_sum_exp.data()) out.log_sum_exp(b, h, i, 0) = weights.log_sum_exp;
        }
    });
}

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
    std::vector<T> of_keys(static_cast<std::size_t>(n * d_k)), of_queries(of_keys.size()), of_values(static_cast<std::size_t>(n * d_v));
    const auto at = [](std::vector<T>& rows, index_t row, index_t c, index_t channels) -> T& {
        return rows[static_cast<std::size_t>(row * channels + c)];
    };
    detail::for_each_lsh_head(buckets, chunk, causal, [&](index_t b, index_t h, const std::vector<std::vector<index_t>>& seen) {
        for (auto* const sums : {&of_keys, &of_queries, &of_values}) std::ranges::fill(*sums, T{0});
        const auto unit = [&](index_t j, index_t c) { return q(b, h, j, c) / detail::lsh_length(q, b, h, j); };
        for (index_t i = 0; i < n; ++i) {
            const auto& keys = seen[static_cast<std::size_t>(i)];
            const detail::lsh_weights<T> weights(q, b, h, i, keys, scale);
            T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, h, i, 0) : T{0}; // dL - dO . out
            for (index_t c = 0; c < d_v; ++c) shift -= d_out.values(b, h, i, c) * weights.of_values(in.values, b, h, keys, c);
            for (std::size_t e = 0; e < keys.size(); ++e) {
                const auto j = keys[e];
                const T weight = weights.of_keys[e];
                const auto product = detail::sum_over<T>(d_v, [&](index_t c) { return d_out.values(b, h, i, c) * in.values(b, h, j, c); });
                const T of_score = static_cast<T>(scale) * weight * (product + shift);
                for (index_t c = 0; c < d_v; ++c) at(of_values, j, c, d_v) += weight * d_out.values(b, h, i, c);
                for (index_t c = 0; c < d_k; ++c) {
                    at(of_keys, j, c, d_k) += of_score * q(b, h, i, c);
                    at(of_queries, i, c, d_k) += of_score * unit(j, c);
                }
            }
        }
        for (index_t i = 0; i < n; ++i) {
            const auto along = detail::sum_over<T>(d_k, [&](index_t c) { return unit(i, c) * at(of_keys, i, c, d_k); });
            const auto squares = detail::sum_over<T>(d_k, [&](index_t c) { return q(b, h, i, c) * q(b, h, i, c); });
            for (index_t c = 0; to.queries.data() && c < d_k; ++c) {
                const T as_key = squares == 0 ? T{0} : (at(of_keys, i, c, d_k) - unit(i, c) * along) / detail::lsh_length(q, b, h, i);
                to.queries(b, h, i, c) = at(of_queries, i, c, d_k) + as_key;
            }
            for (index_t c = 0; to.values.data() && c < d_v; ++c) to.values(b, h, i, c) = at(of_values, i, c, d_v);
        }
    });
}

} // namespace attn::reference
