// Which part of a projected head each rank makes.
#pragma once

#include "../attention/projection_concept.hpp"
#include "key_plan.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// A rank's part in sums that go from one to the next.
struct sum_link {
    row_range parts;     ///< that it adds, as a ResumableProjection numbers them
    index_t before = -1; ///< the rank that hands it the sums, if there is one
    index_t next = -1;   ///< the rank that it hands them to, if there is one
};

/// The shares of ranks, which hold the tokens between cuts, in one projected head. Sums that can be continued are: a part is added where
/// its first token lies. Other rows are made where the first token of their range lies.
template <Scalar T, Projection<T> P>
class projection_shares {
public:
    static constexpr bool sums = ResumableProjection<P, T>;

    projection_shares(const P& projection, index_t head, const row_cuts& cuts) : projection_(projection), head_(head), cuts_(cuts) {}

    sum_link link_of(index_t rank) const {
        sum_link own;
        if constexpr (sums) {
            own.parts = parts_of(rank);
            if (own.parts.count == 0) return own;
            if (own.parts.first > 0) own.before = holder_of(part(own.parts.first - 1).first);
            if (own.parts.end() < projection_.parts(head_, tokens())) own.next = holder_of(part(own.parts.end()).first);
        }
        return own;
    }
    /// The rank that has a projected row first: who adds the last part, or makes it.
    index_t maker_of(index_t row) const {
        if constexpr (sums) return holder_of(part(projection_.parts(head_, tokens()) - 1).first);
        else return holder_of(projection_.range(head_, row, tokens()).first);
    }
    /// Calls f(rank, tokens that it reads) for all ranks, once or more often.
    void for_each_read(const auto& f) const {
        const auto read = [&](index_t rank, index_t first, index_t end) { f(rank, rows_between(first, end)); };
        if constexpr (sums) {
            for (index_t rank = 0; rank < cuts_.ranks(); ++rank)
                if (const auto own = parts_of(rank); own.count > 0) read(rank, part(own.first).first, part(own.end() - 1).end);
        } else {
            for (index_t row = 0; row < projection_.size(head_, tokens()); ++row) {
                const auto range = projection_.range(head_, row, tokens());
                read(maker_of(row), range.first, range.end);
            }
        }
    }

private:
    index_t tokens() const { return cuts_.cuts.back(); }
    kernel::token_range part(index_t number) const { return projection_.part(head_, number, tokens()); }
    /// The rank that a token lies on.
    index_t holder_of(index_t token) const {
        const auto& cuts = cuts_.cuts;
        return std::clamp<index_t>(std::ranges::upper_bound(cuts, token) - cuts.begin() - 1, 0, cuts_.ranks() - 1);
    }
    row_range parts_of(index_t rank) const { return rows_between(part_behind(cuts_.of(rank).first), part_behind(cuts_.of(rank).end())); }
    /// The number of the first part that begins at or behind a token.
    index_t part_behind(index_t token) const {
        index_t first = 0, end = projection_.parts(head_, tokens());
        while (token < tokens() && first < end) {
            const auto middle = first + (end - first) / 2;
            if (part(middle).first < token) first = middle + 1;
            else end = middle;
        }
        return end;
    }

    const P& projection_;
    index_t head_;
    const row_cuts& cuts_;
};

} // namespace attn::detail
