// Which keys each rank of linear attention reads: as sums, one by one, and for its convolution.
#pragma once

#include "../kernel/convolution/convolution_grid.hpp"
#include "../kernel/linear/order.hpp"
#include "../kernel/linear/span_sums.hpp"
#include "key_plan.hpp"
#include "partition.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Which keys of linear attention a rank takes as a sum, and which one by one, by a partition and a pattern; the same on every rank.
template <Scalar T, Pattern P>
class linear_plan {
public:
    using order = kernel::linear_order<T, P>;
    static constexpr index_t keys_of_span() { return kernel::span_sums<T>::span; }

    /// features: how many a key has.
    linear_plan(const P& pattern, const partition& parts, index_t features) : pattern_(pattern), parts_(parts), features_(features) {}

    /// All keys, and a rank's queries.
    input_shapes shapes(index_t rank) const {
        auto s = parts_.shapes();
        s.queries.tokens = parts_.queries(rank).count;
        return s;
    }
    /// The keys that the first row of a rank takes as a sum.
    index_t summed(index_t rank, index_t b) const {
        return with_order(rank, [&](const order& rows) { return rows.absorbed_by(b, 0); });
    }
    /// The keys that queries see, where all see the same.
    index_t seen(index_t b) const {
        return with_order(0, [&](const order& rows) { return rows.seen_by(b, 0); });
    }
    index_t first_with_queries() const { return with_queries_after(-1); }
    /// The next rank that has rows; as many as there are ranks if none has.
    index_t with_queries_after(index_t rank) const {
        for (++rank; rank < parts_.ranks() && parts_.queries(rank).count == 0;) ++rank;
        return rank;
    }
    /// The last rank before another that has rows; the first that has any if there is none.
    index_t with_queries_before(index_t rank) const {
        auto before = first_with_queries();
        while (before < rank && with_queries_after(before) < rank) before = with_queries_after(before);
        return before;
    }
    /// The spans that begin where a rank holds the keys.
    row_range spans_of(index_t rank) const { return rows_between(border(parts_.keys(rank).first), border(parts_.keys(rank).end())); }
    /// How many spans a rank has at most, whatever it holds.
    index_t span_count(index_t rank) const { return (spans_of(rank).count + keys_of_span() - 1) / keys_of_span() + 1; }
    /// The keys of one of a rank's spans.
    row_range span_rows(index_t rank, index_t number) const {
        const auto all = spans_of(rank);
        auto first = all.first;
        for (; number > 0 && first < all.end(); --number) first = border(first + 1);
        return common_rows(rows_between(first, border(first + 1)), all);
    }
    /// The keys that each rank reads.
    std::vector<row_range> key_rows() const {
        std::vector<row_range> all(static_cast<std::size_t>(parts_.ranks()));
        if (parts_.shapes().queries.size() == 0) return all;
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            auto& rows = all[static_cast<std::size_t>(rank)];
            const auto own = parts_.queries(rank);
            for (index_t b = 0; b < parts_.shapes().queries.batch; ++b) {
                const auto first = summed(rank, b);
                const auto end = own.count == 0 ? 0 : with_order(rank, [&](const order& o) { return o.seen_by(b, own.count - 1); });
                if (!order::causal) rows = spanned_rows(rows, common_rows(spans_of(rank), {0, first}));
                rows = spanned_rows(rows, rows_between(order::causal && rank == first_with_queries() ? 0 : first, end));
            }
        }
        return all;
    }
    /// The tokens of a grid that each rank's convolution reads: its halo, with what lies between.
    std::vector<row_range> convolved_rows(const kernel::convolution_grid& grid) const {
        std::vector<row_range> all(static_cast<std::size_t>(parts_.ranks()));
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            const auto own = parts_.queries(rank);
            if (own.count == 0) continue;
            const auto y = own.first / grid.width, last_y = (own.end() - 1) / grid.width;
            const auto above = std::max<index_t>(0, y - grid.top), below = std::min(grid.height, last_y - grid.top + grid.kernel_height);
            const auto left = own.first % grid.width - grid.left, right = (own.end() - 1) % grid.width - grid.left + grid.kernel_width;
            const bool one_line = y == last_y; // of several, those between are read from end to end
            all[static_cast<std::size_t>(rank)] =
                rows_between(above * grid.width + (one_line ? std::max<index_t>(0, left) : 0),
                             (below - 1) * grid.width + (one_line ? std::min(grid.width, right) : grid.width));
        }
        return all;
    }

private:
    /// f(order of a rank's rows).
    auto with_order(index_t rank, const auto& f) const {
        auto s = shapes(rank);
        s.queries.channels = s.keys.channels = features_;
        const inputs<T> in{{nullptr, s.queries, {}},
                           {nullptr, s.keys, {}},
                           {nullptr, s.values, {}},
                           {parts_.positions().first_query[0] + parts_.queries(rank).first, parts_.positions().first_key}};
        return f(order{in, pattern_});
    }
    /// The first border of spans at or behind a key.
    index_t border(index_t key) const {
        if (key == 0) return 0;
        return std::min(parts_.shapes().keys.tokens, key + floor_mod(-(parts_.positions().first_key[0] + key), keys_of_span()));
    }

    const P& pattern_;
    const partition& parts_;
    index_t features_;
};

} // namespace attn::detail
