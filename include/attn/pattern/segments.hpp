#pragma once

#include "bit_table.hpp"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

struct id_bounds {
    std::int32_t low, high;
};

/// Ids of consecutive positions, with a tree of their bounds: node k spans nodes 2 k and 2 k + 1, and the ids are the nodes from
/// `count` on. It answers for any interval in O(log count); where ids rise, as those of packed sequences, the ends tell.
struct id_sequence {
    const id_bounds* nodes;
    index_t count, first;
    bool rising;

    constexpr std::int32_t operator[](index_t position) const { return nodes[count + position - first].low; }
    constexpr id_bounds bounds(const position_range& positions) const {
        auto a = count + positions.first - first, b = count + positions.last - first;
        if (rising) return {nodes[a].low, nodes[b].low};
        auto found = nodes[a];
        const auto include = [&](const id_bounds& node) { found = {std::min(found.low, node.low), std::max(found.high, node.high)}; };
        for (++b; a < b; a /= 2, b /= 2) {
            if (a % 2 != 0) include(nodes[a++]);
            if (b % 2 != 0) include(nodes[--b]);
        }
        return found;
    }
};

/// The ids of one batch entry. `equal` has a row for each query if there are few.
struct segments_of_entry {
    id_sequence queries, keys;
    bit_table equal;

    constexpr bool visible(index_t i, index_t j) const { return queries[i] == keys[j]; }
    constexpr visibility visible(const position_range& i, const position_range& j) const {
        const auto a = queries.bounds(i), b = keys.bounds(j);
        return {a.low == b.high && a.high == b.low, a.high < b.low || b.high < a.low};
    }
    constexpr auto visible(const QueryLanes auto& i, index_t j) const {
        if (equal.words) return mask_of(i, equal.bits(i.first - queries.first, i.step, i.count, j - keys.first));
        const auto id = keys[j];
        return mask_of_each(i, [&](index_t query) { return queries[query] == id; });
    }
};

/// The segments on one box of queries. Keys of a segment follow each other: what the last one answered serves the next.
struct segments_of_box {
    segments_of_entry segments;
    mutable std::int32_t last_id = 0;
    mutable std::uint64_t last_bits = 0;
    mutable bool has_last = false;

    constexpr auto visible(const auto& i, const auto& j) const { return segments.visible(i, j); }
    constexpr auto visible(const QueryLanes auto& i, index_t j) const {
        if (segments.equal.words) return segments.visible(i, j);
        const auto id = segments.keys[j];
        if (!has_last || id != last_id) {
            has_last = true;
            last_id = id;
            last_bits = 0;
            for (index_t l = 0; l < i.count; ++l) last_bits |= std::uint64_t{segments.queries[i.first + l * i.step] == id} << l;
        }
        return mask_of(i, last_bits);
    }
};
constexpr segments_of_box narrowed(const segments_of_entry& p, const position_range&, const position_range&) { return {p}; }

} // namespace attn::detail

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Pairs of the same segment: query_id[i] == key_id[j]. Packed sequences (ids rise), the regions of shifted windows (any order).
/// The ids are copied once, into O(n) memory that copies of the pattern share: keep the pattern, not only the ids.
/// Liu et al. 2021, Swin Transformer (the shift mask).
class segments {
public:
    static constexpr bool compares_positions = false;

    /// Segments whose ids are those of both queries and keys, laid out [entries][n], for the positions from `first`. Batch entry b has the
    /// ids of entry b mod entries: one for all, or the windows of an image, image after image. Throws shape_error if `entries` does not
    /// divide.
    explicit segments(std::span<const std::int32_t> ids, index_t entries = 1, index_t first = 0)
        : segments(ids, ids, entries, first, first) {}

    /// Separate ids for queries and keys, laid out [entries][n] and [entries][m].
    segments(std::span<const std::int32_t> query_ids, std::span<const std::int32_t> key_ids, index_t entries = 1, index_t first_query = 0,
             index_t first_key = 0)
        : entries_(entries) {
        detail::check_positions("segments", "first_query", first_query, 0);
        detail::check_positions("segments", "first_key", first_key, 0);
        if (entries < 1 || std::ssize(query_ids) % entries != 0 || std::ssize(key_ids) % entries != 0)
            detail::raise(shape_error("segments", "ids", "(", query_ids.size(), " for queries, ", key_ids.size(),
                                      " for keys) do not fall into ", entries, " entries"));
        const auto made = std::make_shared<tables>();
        made->queries = trees(query_ids, entries);
        made->keys = trees(key_ids, entries);
        queries_ = {made->queries.data(), std::ssize(query_ids) / entries, first_query, rise(query_ids, entries)};
        keys_ = {made->keys.data(), std::ssize(key_ids) / entries, first_key, rise(key_ids, entries)};
        if (queries_.count <= max_bit_rows) made->equal = equal_ids();
        tables_ = made;
    }

    detail::segments_of_entry at(index_t batch, index_t) const {
        const auto entry = batch % entries_;
        auto queries = queries_, keys = keys_;
        queries.nodes += entry * 2 * queries.count;
        keys.nodes += entry * 2 * keys.count;
        const auto words = detail::bit_table::word_count(queries.count, keys.count);
        return {queries, keys, {tables_->equal.empty() ? nullptr : tables_->equal.data() + entry * words, queries.count, keys.count}};
    }

    bool heads_alike() const { return true; }

    void check(const pattern_context& context) const {
        const auto name = [&] {
            return "segments{" + std::to_string(entries_) + " x " + std::to_string(queries_.count) + " queries, " +
                   std::to_string(keys_.count) + " keys}";
        };
        if (context.batch % entries_ != 0) context.refuse(name(), "is for another batch than ", context.batch);
        context.require_inside(queries_.first, queries_.first + queries_.count, keys_.first, keys_.first + keys_.count, name);
    }

private:
    // As bits, a short sequence's segments cost one load a key, at most 32 bytes for each.
    static constexpr index_t max_bit_rows = 256;

    struct tables {
        std::vector<detail::id_bounds> queries, keys;
        std::vector<std::uint64_t> equal;
    };

    static std::vector<detail::id_bounds> trees(std::span<const std::int32_t> ids, index_t entries) {
        const auto count = std::ssize(ids) / entries;
        std::vector<detail::id_bounds> nodes(2 * ids.size());
        for (index_t entry = 0; entry < entries; ++entry) {
            auto* tree = nodes.data() + entry * 2 * count;
            for (index_t k = 0; k < count; ++k)
                tree[count + k].low = tree[count + k].high = ids[static_cast<std::size_t>(entry * count + k)];
            for (index_t k = count - 1; k > 0; --k)
                tree[k] = {std::min(tree[2 * k].low, tree[2 * k + 1].low), std::max(tree[2 * k].high, tree[2 * k + 1].high)};
        }
        return nodes;
    }

    static bool rise(std::span<const std::int32_t> ids, index_t entries) {
        const auto count = ids.size() / static_cast<std::size_t>(entries);
        for (; !ids.empty(); ids = ids.subspan(count))
            if (!std::ranges::is_sorted(ids.first(count))) return false;
        return true;
    }

    std::vector<std::uint64_t> equal_ids() const {
        const auto words = detail::bit_table::word_count(queries_.count, keys_.count);
        std::vector<std::uint64_t> equal(static_cast<std::size_t>(entries_ * words));
        for (index_t entry = 0; entry < entries_; ++entry) {
            auto* word = equal.data() + entry * words;
            const auto* query = queries_.nodes + (2 * entry + 1) * queries_.count;
            const auto* key = keys_.nodes + (2 * entry + 1) * keys_.count;
            for (index_t i = 0; i < queries_.count; ++i)
                for (index_t j = 0; j < keys_.count; ++j)
                    word[i / 64 * keys_.count + j] |= std::uint64_t{query[i].low == key[j].low} << i % 64;
        }
        return equal;
    }

    index_t entries_;
    detail::id_sequence queries_{}, keys_{};
    std::shared_ptr<const tables> tables_;
};

} // namespace attn::pattern

namespace attn::inline ATTN_INSTRUCTION_SET {

using pattern::segments;

} // namespace attn
