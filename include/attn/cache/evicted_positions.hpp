// Which tokens of a sequence are evicted.
#pragma once

#include "../core/tensor_view.hpp"
#include "../pattern/pattern.hpp"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Positions of evicted tokens: ranges in order, none of which touches another.
class evicted_positions {
public:
    evicted_positions() = default;
    explicit evicted_positions(std::vector<row_range> ranges) : ranges_(std::move(ranges)) {}

    const std::vector<row_range>& ranges() const { return ranges_; }
    /// The position behind the last of them; 0 if there are none.
    index_t end() const { return ranges_.empty() ? 0 : ranges_.back().end(); }
    /// The first position that is left.
    index_t first_left() const { return ranges_.empty() || ranges_[0].first > 0 ? 0 : ranges_[0].end(); }
    /// The range that all of some positions are in; null if some of them are left.
    const row_range* around(const row_range& positions) const {
        const auto range = std::ranges::partition_point(ranges_, [&](const row_range& r) { return r.end() <= positions.first; });
        return range != ranges_.end() && range->first <= positions.first && positions.end() <= range->end() ? &*range : nullptr;
    }
    /// f(range) for the positions before one that are left.
    void for_each_left(index_t end, const auto& f) const {
        index_t first = 0;
        for (const auto& range : ranges_) {
            if (range.first > first) f(row_range{first, range.first - first});
            first = range.end();
        }
        if (first < end) f(row_range{first, end - first});
    }

    /// Adds positions, and returns the range that they are in then.
    row_range add(row_range joined) {
        std::erase_if(ranges_, [&](const row_range& range) {
            if (range.end() < joined.first || joined.end() < range.first) return false;
            const auto first = std::min(range.first, joined.first);
            joined = {first, std::max(range.end(), joined.end()) - first};
            return true;
        });
        ranges_.insert(std::ranges::lower_bound(ranges_, joined.first, {}, &row_range::first), joined);
        return joined;
    }
    /// Drops the positions from one on.
    void truncate(index_t end) {
        while (!ranges_.empty() && ranges_.back().first >= end) ranges_.pop_back();
        if (!ranges_.empty()) ranges_.back().count = std::min(ranges_.back().count, end - ranges_.back().first);
    }

private:
    std::vector<row_range> ranges_;
};

/// Hides the keys at some positions, in order.
struct kept_keys {
    static constexpr bool compares_positions = false;
    std::span<const row_range> evicted;

    bool visible(const auto&, index_t j) const {
        const auto* const range = from(j);
        return range == end() || j < range->first;
    }
    visibility visible(const position_range&, const position_range& j) const {
        const auto* const range = from(j.first);
        const bool all = range == end() || j.last < range->first;
        return {all, !all && range->first <= j.first && j.last < range->end()};
    }

private:
    const row_range* end() const { return evicted.data() + evicted.size(); }
    /// The first range that does not lie before a position.
    const row_range* from(index_t position) const {
        return std::partition_point(evicted.data(), end(), [&](const row_range& range) { return range.end() <= position; });
    }
};

} // namespace attn::detail
