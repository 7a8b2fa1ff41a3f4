// Which blocks of keys the blocks of queries attend to: the index that selected attention needs.
#pragma once

#include "../pattern/selected.hpp"
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// How select_blocks chooses.
struct block_selection {
    index_t query_block = 64; ///< queries that share a list
    index_t key_block = 64;
    index_t count = 8;  ///< blocks in a list
    bool causal = true; ///< only blocks that begin at or before the last of the queries; the one that holds it is always chosen
};

/// The blocks of keys whose means score highest with the mean of a block of queries: the table of `selected`.
///     score[u, w] = mean of the queries of block u . mean of the keys of block w
/// The table (batch, heads, query blocks, count) lists the `count` highest, the highest first, of equal ones the earlier block first, and
/// -1 where there are fewer; a score that is NaN counts as the lowest. For q (batch, heads, n, d) and k (batch, kv_heads, m, d); query 0 is
/// at position first_query, key 0 at 0. Sums in double. Time: (n + m) d and n m d / (query_block key_block) a head. Throws shape_error if q
/// and k do not fit each other, argument_error for a number below 1 or a first_query below 0.
/// Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs".
template <TensorLike Q, TensorLike K>
[[nodiscard]] tensor<index_t> select_blocks(const Q& q, const K& k, const block_selection& rule = {}, index_t first_query = 0) {
    constexpr auto name = "select_blocks";
    using T = detail::scalar_t<Q>;
    static_assert(std::same_as<T, detail::scalar_t<K>>, "attn: q and k must have the same scalar type");
    const tensor_view<const T> queries = q, keys = k;
    const auto &n = queries.shape(), &m = keys.shape();
    detail::check_view(name, "q", queries);
    detail::check_view(name, "k", keys);
    if (m.batch != n.batch || m.channels != n.channels || !detail::divides(m.heads, n.heads))
        detail::refuse(name, "k", m, "q", n, "batch, heads or channels do not fit");
    if (std::min({rule.query_block, rule.key_block, rule.count}) < 1) detail::raise(argument_error(name, "rule", "has a number below 1"));
    if (first_query < 0) detail::raise(argument_error(name, "first_query", "is ", first_query, ", but blocks are counted from 0"));
    detail::check_positions(name, "first_query", first_query, n.tokens);

    // Blocks of queries are counted from position 0 on, as `selected` does; those before the first query stay empty.
    const auto first_row = first_query / rule.query_block;
    const auto rows = n.tokens > 0 ? (first_query + n.tokens - 1) / rule.query_block + 1 : first_row;
    const auto columns = (m.tokens + rule.key_block - 1) / rule.key_block;
    const auto mean = [&](const tensor_view<const T>& x, index_t b, index_t h, index_t begin, index_t end, double* to) {
        std::fill_n(to, n.channels, 0.0);
        for (index_t t = begin; t < end; ++t)
            for (index_t c = 0; c < n.channels; ++c) to[c] += static_cast<double>(x(b, h, t, c));
        for (index_t c = 0; c < n.channels; ++c) to[c] /= static_cast<double>(end - begin);
    };
    tensor<index_t> table({n.batch, n.heads, rows, rule.count});
    std::fill_n(table.data(), table.shape().size(), index_t{-1});
    tensor<double> means({1, 1, columns, n.channels}), one({1, 1, 1, n.channels});
    std::vector<double> scores(static_cast<std::size_t>(columns));
    std::vector<index_t> order(scores.size());
    for (index_t b = 0; b < n.batch; ++b)
        for (index_t h = 0; h < n.heads; ++h) {
            const auto group = n.heads / m.heads;
            if (h % group == 0)
                for (index_t w = 0; w < columns; ++w)
                    mean(keys, b, h / group, w * rule.key_block, std::min(m.tokens, (w + 1) * rule.key_block), means.view().row(0, 0, w));
            for (auto u = first_row; u < rows; ++u) {
                const auto begin = std::max<index_t>(0, u * rule.query_block - first_query);
                const auto end = std::min(n.tokens, (u + 1) * rule.query_block - first_query);
                mean(queries, b, h, begin, end, one.data());
                const auto own = (first_query + end - 1) / rule.key_block;
                const auto eligible = rule.causal ? std::min(columns, own + 1) : columns;
                for (index_t w = 0; w < eligible; ++w) {
                    const auto* const of_keys = means.view().row(0, 0, w);
                    const auto score = std::inner_product(of_keys, of_keys + n.channels, one.data(), 0.0);
                    constexpr auto infinity = std::numeric_limits<double>::infinity();
                    scores[static_cast<std::size_t>(w)] = rule.causal && w == own ? infinity : std::isnan(score) ? -infinity : score;
                }
                const auto chosen = std::min(rule.count, eligible);
                std::iota(order.data(), order.data() + eligible, index_t{0});
                std::partial_sort(order.data(), order.data() + chosen, order.data() + eligible, [&](index_t x, index_t y) {
                    const auto a = scores[static_cast<std::size_t>(x)], c = scores[static_cast<std::size_t>(y)];
                    return a != c ? a > c : x < y;
                });
                std::copy_n(order.data(), chosen, table.view().row(b, h, u));
            }
        }
    return table;
}

} // namespace attn
