// What definitions ask about pairs of a query and a key. The types of patterns and functions are hidden, so that a definition is compiled
// once for the type that it computes in.
#pragma once

#include "../pattern/pattern.hpp"
#include "../score/dual.hpp"
#include "../score/score_function.hpp"

#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::reference::detail {

/// Whether query i sees key j, by their positions, in a batch entry and head.
using visible_pairs = std::function<bool(index_t i, index_t j)>;
/// What a score becomes, there.
template <class T>
using pair_scores = std::function<T(const T& score, index_t i, index_t j)>;
/// What a score becomes, and the derivative of that by the score.
template <class T>
using pair_slopes = std::function<dual_numbers::dual<T>(const T& score, index_t i, index_t j)>;
/// One of these for each batch entry and head.
template <class F>
using of_head = std::function<F(index_t batch, index_t head)>;

/// Of a pattern, which outlives them.
template <Pattern P>
of_head<visible_pairs> visible_pairs_of(const P& pattern) {
    return [&pattern](index_t b, index_t h) -> visible_pairs {
        return [here = at(pattern, b, h)](index_t i, index_t j) -> bool { return here.visible(i, j); };
    };
}
/// Of a score function, which outlives them.
template <class T, ScoreFunction S>
of_head<pair_scores<T>> pair_scores_of(const S& score) {
    return [&score](index_t b, index_t h) -> pair_scores<T> {
        return [here = score_at(score, b, h)](const T& x, index_t i, index_t j) { return static_cast<T>(here(x, i, j)); };
    };
}
/// Of a score function, which outlives them.
template <class T, ScoreFunction S>
of_head<pair_slopes<T>> pair_slopes_of(const S& score) {
    return [&score](index_t b, index_t h) -> pair_slopes<T> {
        return [here = score_at(score, b, h)](const T& x, index_t i, index_t j) { return attn::detail::differentiated(here, x, i, j); };
    };
}

} // namespace attn::reference::detail
