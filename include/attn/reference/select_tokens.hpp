// Which keys score highest for a query, by the definition.
#pragma once

#include "../core/inputs.hpp"
#include "../core/tensor.hpp"
#include "../pattern/pattern.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// The table of select_tokens: all scores of a query are computed and sorted.
///     score[i, j] = sum over heads h of weights[i, h] f(q_i,h . k_j)
template <class T>
tensor<index_t> select_tokens(const inputs<T>& in, const tensor_view<const T>& weights, index_t count, const auto& pattern, const auto& f) {
    const auto q = in.queries.numbers(), k = in.keys.numbers();
    const auto &n = q.shape(), &m = k.shape();
    tensor<index_t> table({n.batch, 1, n.tokens, count});
    attn::detail::for_each_row(table.shape(), [&](index_t b, index_t, index_t i) {
        std::vector<std::pair<T, index_t>> found; // a score turned about, so that the lowest is chosen first, and a position
        for (index_t j = 0; j < m.tokens; ++j) {
            const auto position = in.positions.first_key[b] + j;
            if (!at(pattern, b, 0).visible(in.positions.first_query[b] + i, position)) continue;
            T score = 0;
            for (index_t h = 0; h < n.heads; ++h) {
                T x = 0;
                for (index_t c = 0; c < n.channels; ++c) x += q(b, h, i, c) * k(b, h / (n.heads / m.heads), j, c);
                score += weights(b, h, i, 0) * f(x);
            }
            found.push_back({std::isnan(score) ? std::numeric_limits<T>::infinity() : -score, position});
        }
        std::sort(found.begin(), found.end());
        found.resize(std::min(found.size(), static_cast<std::size_t>(count)));
        for (index_t e = 0; e < count; ++e) table(b, 0, i, e) = e < std::ssize(found) ? found[static_cast<std::size_t>(e)].second : -1;
        std::sort(&table(b, 0, i, 0), &table(b, 0, i, 0) + std::ssize(found));
    });
    return table;
}

} // namespace attn::reference
