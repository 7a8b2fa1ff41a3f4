// What the tests of patterns share: lanes that are an array, and the check that ranges and lanes agree with integers.
#pragma once

#include <attn/pattern/narrowed.hpp>
#include <attn/pattern/passes.hpp>

#include <array>
#include <random>
#include <vector>

namespace fake {

using attn::index_t;
constexpr int lane_count = 16;

struct mask {
    std::array<bool, lane_count> lane;

    static mask of(auto&& value) {
        mask m{};
        for (std::size_t l = 0; l < lane_count; ++l) m.lane[l] = value(l);
        return m;
    }
    friend mask operator&&(const mask& a, const mask& b) { return of([&](std::size_t l) { return a.lane[l] && b.lane[l]; }); }
    friend mask operator||(const mask& a, const mask& b) { return of([&](std::size_t l) { return a.lane[l] || b.lane[l]; }); }
    friend mask operator!(const mask& a) { return of([&](std::size_t l) { return !a.lane[l]; }); }
    friend mask operator&&(const mask& a, bool b) { return of([&](std::size_t l) { return a.lane[l] && b; }); }
    friend mask operator||(const mask& a, bool b) { return of([&](std::size_t l) { return a.lane[l] || b; }); }
    friend mask operator&&(bool a, const mask& b) { return b && a; }
    friend mask operator||(bool a, const mask& b) { return b || a; }
};

struct positions {
    std::array<index_t, lane_count> lane{};

    static positions of(auto&& value) {
        positions p;
        for (std::size_t l = 0; l < lane_count; ++l) p.lane[l] = value(l);
        return p;
    }
    friend positions operator+(const positions& a, index_t b) { return of([&](std::size_t l) { return a.lane[l] + b; }); }
    friend positions operator+(index_t a, const positions& b) { return b + a; }
    friend positions operator-(const positions& a, index_t b) { return a + -b; }
    friend positions operator-(index_t a, const positions& b) { return of([&](std::size_t l) { return a - b.lane[l]; }); }
    friend positions operator*(const positions& a, index_t b) { return of([&](std::size_t l) { return a.lane[l] * b; }); }
    friend positions operator*(index_t a, const positions& b) { return b * a; }
    friend positions operator/(const positions& a, index_t b) { return of([&](std::size_t l) { return a.lane[l] / b; }); }
    friend positions operator%(const positions& a, index_t b) { return of([&](std::size_t l) { return a.lane[l] % b; }); }
    friend positions floor_div(const positions& a, index_t b) { return of([&](std::size_t l) { return attn::floor_div(a.lane[l], b); }); }
    friend positions floor_mod(const positions& a, index_t b) { return of([&](std::size_t l) { return attn::floor_mod(a.lane[l], b); }); }
    friend positions abs(const positions& a) { return of([&](std::size_t l) { return attn::abs(a.lane[l]); }); }

    friend mask operator<(const positions& a, index_t b) { return mask::of([&](std::size_t l) { return a.lane[l] < b; }); }
    friend mask operator==(const positions& a, index_t b) { return mask::of([&](std::size_t l) { return a.lane[l] == b; }); }
    friend mask operator<=(const positions& a, index_t b) { return a < b || a == b; }
    friend mask operator>(const positions& a, index_t b) { return !(a <= b); }
    friend mask operator>=(const positions& a, index_t b) { return !(a < b); }
    friend mask operator!=(const positions& a, index_t b) { return !(a == b); }
    friend mask operator<(index_t a, const positions& b) { return b > a; }
    friend mask operator<=(index_t a, const positions& b) { return b >= a; }
    friend mask operator>(index_t a, const positions& b) { return b < a; }
    friend mask operator>=(index_t a, const positions& b) { return b <= a; }
    friend mask operator==(index_t a, const positions& b) { return b == a; }
    friend mask operator!=(index_t a, const positions& b) { return b != a; }
};

struct queries : positions {
    index_t first, step;
    int count;
    static constexpr int size = lane_count;

    queries(index_t at, index_t by, int valid)
        : positions(of([&](std::size_t l) { return at + by * static_cast<index_t>(l); })), first(at), step(by), count(valid) {}
    static mask mask_from_bits(std::uint64_t bits) {
        return mask::of([&](std::size_t l) { return (bits >> l & 1) != 0; });
    }
};

inline bool lane_of(const mask& m, std::size_t l) { return m.lane[l]; }
inline bool lane_of(bool m, std::size_t) { return m; }

} // namespace fake

namespace pattern_checks {

using attn::index_t;

inline bool same_on_lanes(const auto& on_lanes, const auto& on_integers, const attn::query_tile& tile, index_t j) {
    for (index_t begin = 0; begin < tile.count; begin += fake::lane_count) {
        const auto count = std::min<index_t>(fake::lane_count, tile.count - begin);
        const auto seen = on_lanes.visible(fake::queries(tile.first + begin * tile.step, tile.step, static_cast<int>(count)), j);
        for (index_t l = 0; l < count; ++l)
            if (fake::lane_of(seen, static_cast<std::size_t>(l)) != on_integers.visible(tile.first + (begin + l) * tile.step, j)) return false;
    }
    return true;
}

struct verdict {
    index_t boxes = 0, wrong = 0, undecided = 0; // undecided: some, where integers know
};

/// One box: ranges must not claim what integers deny, and lanes must say what integers say.
inline void check_box(const auto& p, const attn::query_tile& tile, const attn::key_run& run, verdict& found) {
    index_t seen = 0;
    for (index_t i = 0; i < tile.count; ++i)
        for (index_t j = 0; j < run.count; ++j) seen += p.visible(tile.first + i * tile.step, run.first + j * run.step);
    const attn::visibility known = p.visible(tile.positions(), run.positions());
    const bool all = seen == tile.count * run.count;
    found.boxes += 1;
    found.wrong += (known.is_all() && !all) || (known.is_none() && seen > 0);
    found.undecided += (all || seen == 0) && !known.is_all() && !known.is_none();
    for (index_t j = 0; j < run.count; ++j) found.wrong += !same_on_lanes(p, p, tile, run.first + j * run.step);
}

/// All boxes of up to 4 queries and 5 keys, steps 1 to 3, with positions in [low, high).
inline verdict check_boxes(const auto& p, index_t low, index_t high) {
    verdict found;
    for (index_t i = low; i < high; ++i)
        for (index_t j = low; j < high; ++j)
            for (index_t step = 1; step <= 3; ++step)
                for (index_t queries = 1; queries <= 4 && i + (queries - 1) * step < high; ++queries)
                    for (index_t keys = 1; keys <= 5 && j + (keys - 1) * step < high; ++keys)
                        check_box(p, {i, queries, step}, {j, keys, step, false}, found);
    return found;
}

struct problem {
    index_t first_query, queries, first_key, keys, tile, grain;
};

/// The schedule against integers: every visible pair is visited once, in one pass; no full run has a hidden pair; runs rise, are
/// apart or differ in fullness, and stay inside; lanes and narrowed patterns agree. Returns the number of offences.
inline index_t schedule_offences(const auto& p, const problem& x) {
    std::vector<int> visits(static_cast<std::size_t>(x.queries * x.keys));
    index_t offences = 0, passes = 0;
    attn::for_each_pass(p, x.first_query, x.queries, x.first_key, x.keys, [&](const auto& pass, index_t step) {
        ++passes;
        index_t rows = 0;
        for (index_t t = 0; t < attn::tile_count(x.queries, x.tile, step); ++t) {
            const auto tile = attn::tile_at(t, x.first_query, x.queries, x.tile, step);
            rows += tile.count;
            offences += tile.count < 1 || tile.count > x.tile;
            attn::key_run last{x.first_key - 1, 0, 0, false};
            auto end = x.first_key;
            attn::for_each_run(pass, tile, x.first_key, x.keys, x.grain, [&](const attn::key_run& run) {
                offences += run.count < 1 || run.first < end || run.step != step || run.positions().last >= x.first_key + x.keys;
                offences += last.count > 0 && run.first == end && run.full == last.full;
                offences += step > 1 && (run.first - tile.first) % step != 0;
                last = run;
                end = run.first + run.count * step;
                using attn::narrowed; // or one that the pattern brings along
                const auto on_box = narrowed(pass, tile.positions(), run.positions());
                for (index_t k = 0; k < run.count; ++k) {
                    const auto j = run.first + k * step;
                    for (index_t r = 0; r < tile.count; ++r) {
                        const auto i = tile.first + r * step;
                        const bool seen = pass.visible(i, j);
                        offences += run.full && !seen;
                        visits[static_cast<std::size_t>((i - x.first_query) * x.keys + j - x.first_key)] += seen;
                    }
                    offences += !same_on_lanes(on_box, pass, tile, j);
                }
            });
        }
        offences += rows != x.queries;
    });
    offences += passes < 1 || passes > attn::max_passes<std::remove_cvref_t<decltype(p)>>;
    for (index_t i = 0; i < x.queries; ++i)
        for (index_t j = 0; j < x.keys; ++j)
            offences += visits[static_cast<std::size_t>(i * x.keys + j)] != p.visible(x.first_query + i, x.first_key + j);
    return offences;
}

inline index_t pick(std::mt19937& random, index_t low, index_t high) { return std::uniform_int_distribution<index_t>(low, high)(random); }

} // namespace pattern_checks
