// Numbers that are added to scores, as a bias is.
#pragma once

#include "../simd/positions.hpp"

#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Score functions that add a tile of numbers to the scores of a run of keys, and do nothing else: numbers[row * stride + query], and to
/// those of a panel's lone query lone[row].
template <Scalar T, class Arch>
struct added_scores {
    using lanes = simd::lanes<T, Arch>;
    const T* numbers = nullptr;
    index stride = 0;
    const T* lone = nullptr;

    /// Those of later rows and queries.
    added_scores from(index row, index query = 0) const { return {numbers + row * stride + query, stride, lone ? lone + row : nullptr}; }
    added_scores of_lone_query() const { return {lone, 1, lone}; }
    /// As a score function: the score of the first queries with one key. What hides a key does not ask what it holds.
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>&, index, index row) const {
        return hide(score + lanes::load(numbers + row * stride), row);
    }
    /// A score to which they have been added, unless they hide the key.
    [[gnu::always_inline]] lanes hide(lanes score, index row) const {
        const lanes added = lanes::load(numbers + row * stride);
        return select(added == lanes(-std::numeric_limits<T>::infinity()), added, score);
    }
};

/// Nothing is added.
struct no_scores {
    no_scores from(index) const { return {}; }
    template <Scalar T, class Arch>
    operator added_scores<T, Arch>() const {
        return {};
    }
};

} // namespace attn::kernel
