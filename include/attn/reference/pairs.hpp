// What definitions ask about pairs of a query and a key. The types of patterns and functions are hidden, so that a definition is compiled
// once for the type that it computes in.
#pragma once

#include "../core/gradients.hpp"
#include "../pattern/pattern.hpp"
#include "../score/dual.hpp"
#include "number.hpp"

#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference::detail {

/// A pattern, which outlives it: whether query i sees key j, by their positions, in a batch entry and head.
struct visible_pairs : std::function<std::function<bool(index_t i, index_t j)>(index_t batch, index_t head)> {
    template <Pattern P>
    visible_pairs(const P& pattern)
        : function([&pattern](index_t b, index_t h) {
              return [here = at(pattern, b, h)](index_t i, index_t j) -> bool { return here.visible(i, j); };
          }) {}
};
/// A score function, which outlives it: what a score becomes, in a batch entry and head, and the derivative of that by the score, for which
/// 0 stands where it is not asked for.
template <class T, bool differentiated>
struct pair_scores : std::function<std::function<dual<T>(const T& score, index_t i, index_t j)>(index_t batch, index_t head)> {
    template <ScoreFunction S>
    pair_scores(const S& score)
        : pair_scores::function([&score](index_t b, index_t h) {
              return [here = score_at(score, b, h)](const T& x, index_t i, index_t j) -> dual<T> {
                  if constexpr (differentiated) return attn::detail::differentiated(here, x, i, j);
                  else return {static_cast<T>(here(x, i, j)), T{0}};
              };
          }) {}
};

/// What the gradient of a pair's score is given to.
template <class T>
using pair_gradients = std::function<void(index_t b, index_t h, index_t i, index_t j, const T& x, const T& dx)>;

/// scale * sum_c q[b,h,row,c] k[b,g,key,c]
template <class T>
T scaled_product(const inputs<T>& in, T scale, index_t b, index_t h, index_t g, index_t row, index_t key) {
    const auto q = in.queries.rows(b, h, row), k = in.keys.rows(b, g, key);
    const auto product = [&](const auto& x, const auto& y) {
        return sum_over<T>(in.queries.shape().channels, [&](index_t c) { return x(0, c) * y(0, c); });
    };
    // As they lie, if they are stored in T: these sums are most of what a definition costs.
    return scale * (q.is_narrow() || k.is_narrow() ? product(q, k) : product(q.numbers(), k.numbers()));
}
/// What products are multiplied by: 1 / sqrt(d_k) if nothing is given.
template <class T>
T scale_of(const inputs<T>& in, const std::optional<double>& given) {
    return static_cast<T>(given.value_or(1 / sqrt(static_cast<double>(in.queries.shape().channels))));
}
/// The sink of a head; -infinity if there is none.
template <class T>
T sink_of(std::span<const double> sinks, index_t head) {
    return sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(sinks[static_cast<std::size_t>(head)]);
}
/// What a sink adds to the denominator of a row whose largest score, with the sink, is `largest`.
template <class T>
T sink_share(T sink, T largest) {
    return sink == -std::numeric_limits<T>::infinity() ? 0 : sink == largest ? 1 : exp(sink - largest); // infinity - infinity is NaN
}

} // namespace attn::reference::detail
