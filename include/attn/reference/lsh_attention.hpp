// The definition of LSH attention, from the buckets of its tokens.
#pragma once

#include "../core/inputs.hpp"
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
    T squares = 0;
    for (index_t c = 0; c < q.shape().channels; ++c) squares += q(b, h, j, c) * q(b, h, j, c);
    return squares == 0 ? T{1} : sqrt(squares);
}
template <class T>
T lsh_score(const stored_view<const T>& q, index_t b, index_t h, index_t i, index_t j, double scale) {
    const T length = lsh_length(q, b, h, j);
    T product = 0;
    for (index_t c = 0; c < q.shape().channels; ++c) product += q(b, h, i, c) * (q(b, h, j, c) / length);
    return static_cast<T>(scale) * product;
}

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
    std::vector<T> x;
    detail::for_each_lsh_head(buckets, chunk, causal, [&](index_t b, index_t h, const std::vector<std::vector<index_t>>& seen) {
        for (index_t i = 0; i < std::ssize(seen); ++i) {
            const auto& keys = seen[static_cast<std::size_t>(i)];
            x.clear();
            for (const auto j : keys) x.push_back(detail::lsh_score(in.queries, b, h, i, j, scale));
            const T largest = *std::ranges::max_element(x);
            T denominator = 0;
            for (auto& s : x) denominator += s = exp(s - largest);
            for (index_t c = 0; c < d_v; ++c) {
                T sum = 0;
                for (std::size_t e = 0; e < keys.size(); ++e) sum += x[e] / denominator * in.values(b, h, keys[e], c);
                out.values(b, h, i, c) = sum;
            }
            if (out.log_sum_exp.data()) out.log_sum_exp(b, h, i, 0) = largest + log(denominator);
        }
    });
}

} // namespace attn::reference
