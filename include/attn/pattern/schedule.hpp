// The schedule of a pattern: which keys a tile of queries visits, found by evaluating the pattern on ranges.
#pragma once

#include "pattern.hpp"

#include <bit>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Query positions first, first + step, ..., that are computed together.
struct query_tile {
    index_t first, count, step;

    /// The positions, as a pattern sees them.
    constexpr position_range positions() const { return {first, first + (count - 1) * step, step}; }
    /// A part of the tile: at most `limit` of its queries, from number `begin` on.
    constexpr query_tile part(index_t begin, index_t limit) const { return {first + begin * step, std::min(limit, count - begin), step}; }
};

/// Key positions first, first + step, ..., visited by one tile of queries. Full: every pair is visible, so none needs a mask.
struct key_run {
    index_t first, count, step;
    bool full;

    /// The positions, as a pattern sees them.
    constexpr position_range positions() const { return {first, first + (count - 1) * step, step}; }
};

/// What attention costs: the pairs that are visible, and the pairs that the schedule visits.
struct pair_count {
    index_t visible = 0;
    index_t visited = 0;
};

/// Number of tiles of at most `tile` queries that n queries fall into. Tiles of step s hold queries of one residue class modulo s.
constexpr index_t tile_count(index_t n, index_t tile, index_t step = 1) {
    const auto tiles_of = [tile](index_t queries) { return (queries + tile - 1) / tile; };
    return n % step * tiles_of(n / step + 1) + (std::min(n, step) - n % step) * tiles_of(n / step);
}

/// Tile number t < tile_count(n, tile, step) of the n queries that begin at first_query. With a unit, of which `tile` is a multiple,
/// the units of a residue class are spread evenly over its tiles; without, all its tiles but the last are full.
constexpr query_tile tile_at(index_t t, index_t first_query, index_t n, index_t tile, index_t step = 1, index_t unit = 0) {
    if (step == 1 && n <= tile) return {first_query, n, step}; // before a dozen divisions: few queries have little work besides
    const auto short_class = n / step, long_classes = n % step;
    const auto tiles_of = [tile](index_t queries) { return (queries + tile - 1) / tile; };
    const auto in_long = long_classes * tiles_of(short_class + 1);
    const bool is_long = t < in_long;
    const auto queries = short_class + is_long;
    const auto rest = is_long ? t : t - in_long;
    const auto tiles = tiles_of(queries), number = rest % tiles;
    const auto residue = rest / tiles + (is_long ? 0 : long_classes);
    if (unit == 0) unit = tile;
    const auto units = (queries + unit - 1) / unit;
    const auto row = units * number / tiles * unit, end = std::min(queries, units * (number + 1) / tiles * unit);
    return {first_query + residue + row * step, end - row, step};
}

/// Calls visit(key_run) for the runs of the `keys` keys from first_key that the tile visits, in rising order, disjoint, neighbours
/// differing in fullness or apart. A tile of step s visits keys of its own residue class, in steps of s: the pattern must promise
/// that step. Runs begin and end at multiples of `grain` keys from the first, or at the last. Nothing is allocated.
constexpr void for_each_run(const Pattern auto& p, const query_tile& tile, index_t first_key, index_t keys, index_t grain, auto&& visit) {
    const auto skip = tile.step > 1 ? floor_mod(tile.first - first_key, tile.step) : 0;
    if (tile.count <= 0 || keys <= skip) return;
    const auto queries = tile.positions();
    const auto first = first_key + skip, count = (keys - skip + tile.step - 1) / tile.step;
    const auto box = [&](index_t from, index_t to) { return key_run{first + from * tile.step, to - from, tile.step, false}; };
    auto pending = box(0, 0);
    index_t gaps = 0, asked_at = 1;

    // Bisection, depth first: `width` grains from grain `at`. A box is a left half if its width divides `at` an even number of times.
    const auto grains = (count + grain - 1) / grain;
    auto width = static_cast<index_t>(std::bit_ceil(static_cast<std::size_t>(grains)));
    for (index_t at = 0; at < grains;) {
        auto run = box(at * grain, std::min((at + width) * grain, count));
        const visibility seen = p.visible(queries, run.positions());
        if (!seen.is_none() && !seen.is_all() && width > 1) {
            width /= 2;
            continue;
        }
        const bool is_left_half = (at & width) == 0;
        at += width;
        // Half of a box that is neither all nor none: if this half is, the other one is not, and is cut without being asked.
        width = is_left_half && width > 1 ? width / 2 : at & -at;
        if (seen.is_none()) {
            if (pending.count == 0) continue;
            visit(std::as_const(pending));
            pending.count = 0;
            // Is that all? Asked after 1, 2, 4, ... gaps: a pattern of many runs answers no each time.
            if (++gaps == asked_at && at < grains) {
                if (visibility(p.visible(queries, box(at * grain, count).positions())).is_none()) return;
                asked_at *= 2;
            }
            continue;
        }
        run.full = seen.is_all();
        if (pending.count > 0 && pending.full == run.full) {
            pending.count += run.count;
            continue;
        }
        if (pending.count > 0) visit(std::as_const(pending));
        pending = run;
    }
    if (pending.count > 0) visit(std::as_const(pending));
}

namespace detail {

/// seen[j]: whether the pattern shows key first_key + j to all of the queries.
inline void find_visible(const Pattern auto& pattern, const query_tile& queries, index_t first_key, index_t keys, bool* seen) {
    std::fill_n(seen, keys, false);
    for_each_run(pattern, queries, first_key, keys, 1,
                 [&](const key_run& r) { std::fill_n(seen + (r.first - first_key), r.count, r.full); });
}

} // namespace detail

} // namespace attn
