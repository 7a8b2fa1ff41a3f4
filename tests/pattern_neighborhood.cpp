// Neighbourhood attention's pattern against NATTEN's rule, written out.
#include "catch.hpp"
#include "errors.hpp"
#include "pattern_checks.hpp"

#include <attn/pattern/neighborhood.hpp>
#include <attn/pattern/passes.hpp>

namespace attn::testing {

namespace {

using pattern::neighborhood, pattern::neighborhood_rule;

/// Whether place x of an axis sees place y.
bool sees(index_t length, index_t window, index_t dilation, bool causal, index_t x, index_t y) {
    if (x % dilation != y % dilation) return false;
    std::vector<index_t> of_class;
    for (index_t p = x % dilation; p < length; p += dilation) of_class.push_back(p);
    const auto t = x / dilation, count = std::ssize(of_class);
    const auto start = causal ? std::max<index_t>(0, t - window + 1) : std::min(std::max<index_t>(t - window / 2, 0), count - window);
    const auto end = causal ? t + 1 : start + window;
    for (auto p = start; p < end; ++p)
        if (of_class[static_cast<std::size_t>(p)] == y) return true;
    return false;
}

template <std::size_t D>
std::array<index_t, D> place_of(const neighborhood_rule<D>& rule, index_t token) {
    std::array<index_t, D> at;
    index_t of_tile = 1;
    for (const auto extent : rule.tile) of_tile *= extent;
    auto tile = token / of_tile, inside = token % of_tile;
    for (std::size_t a = D; a-- > 0;) {
        at[a] = tile % (rule.grid[a] / rule.tile[a]) * rule.tile[a] + inside % rule.tile[a];
        tile /= rule.grid[a] / rule.tile[a];
        inside /= rule.tile[a];
    }
    return at;
}

template <std::size_t D>
void check_rule(const neighborhood_rule<D>& rule) {
    const neighborhood p(rule);
    index_t tokens = 1, wrong = 0;
    for (const auto extent : rule.grid) tokens *= extent;
    for (index_t i = 0; i < tokens; ++i)
        for (index_t j = 0; j < tokens; ++j) {
            const auto q = place_of(rule, i), k = place_of(rule, j);
            bool seen = true;
            for (std::size_t a = 0; a < D; ++a) seen = seen && sees(rule.grid[a], rule.window[a], rule.dilation[a], rule.causal[a], q[a], k[a]);
            wrong += p.visible(i, j) != seen;
            wrong += seen && (i - j) % p.step() != 0;
        }
    CHECK(wrong == 0);
    const auto found = pattern_checks::check_boxes(p, 0, std::min<index_t>(tokens, 30));
    CHECK(found.wrong == 0);
}

} // namespace

TEST_CASE("neighborhood: NATTEN's rule in one, two and three dimensions", "[pattern]") {
    for (const index_t window : {1, 2, 3, 6, 7})
        for (const index_t dilation : {1, 2, 3})
            for (const bool causal : {false, true}) check_rule<1>({.grid = {23}, .window = {window}, .dilation = {dilation}, .causal = {causal}});
    check_rule<2>({.grid = {7, 9}, .window = {3, 5}});
    check_rule<2>({.grid = {7, 9}, .window = {7, 9}});
    check_rule<2>({.grid = {7, 9}, .window = {3, 2}, .dilation = {2, 4}});
    check_rule<2>({.grid = {6, 9}, .window = {3, 3}, .causal = {true, false}});
    check_rule<2>({.grid = {8, 12}, .window = {3, 5}, .tile = {4, 4}});
    check_rule<2>({.grid = {8, 9}, .window = {5, 2}, .dilation = {1, 3}, .causal = {false, true}, .tile = {2, 3}});
    check_rule<3>({.grid = {3, 4, 5}, .window = {3, 3, 3}});
    check_rule<3>({.grid = {4, 4, 6}, .window = {1, 3, 2}, .dilation = {2, 1, 3}, .causal = {true, false, false}});
    check_rule<3>({.grid = {4, 4, 6}, .window = {2, 3, 3}, .tile = {2, 2, 2}});
}

TEST_CASE("neighborhood: tiles of tokens visit fewer pairs, dilated tokens only their residue class", "[pattern]") {
    const auto visited = [](const auto& p, index_t n) { return static_cast<double>(visited_pairs(p, 0, n, 0, n, 16, 8).visited); };
    const index_t n = 56 * 56;
    const neighborhood rows(neighborhood_rule<2>{.grid = {56, 56}, .window = {7, 7}}),
        tiled(neighborhood_rule<2>{.grid = {56, 56}, .window = {7, 7}, .tile = {4, 4}});
    CHECK(visited_pairs(rows, 0, n, 0, n, 16, 8).visible == n * 49);
    CHECK(visited_pairs(tiled, 0, n, 0, n, 16, 8).visible == n * 49);
    CHECK(visited(tiled, n) <= 49.0 / 0.28 * n);
    CHECK(visited(tiled, n) < 0.75 * visited(rows, n));
    const neighborhood dilated(neighborhood_rule<1>{.grid = {4096}, .window = {16}, .dilation = {8}});
    CHECK(dilated.step() == 8);
    CHECK(visited(dilated, 4096) <= 40.0 * 4096);
}

TEST_CASE("neighborhood: refuses what is no grid, and positions outside", "[pattern]") {
    const auto refusal = [](const neighborhood_rule<2>& rule) { return error_of([&] { (void)neighborhood(rule); }); };
    CHECK(refusal({.grid = {8, 8}, .window = {3, 3}}) == nothing_thrown);
    CHECK(refusal({.grid = {8, 8}, .window = {3, 9}}) ==
          "neighborhood: rule of the grid 8 x 8 and the window 3 x 9 has a window that is longer than its axis, or an axis beyond 2^24");
    CHECK(refusal({.grid = {8, 8}, .window = {3, 3}, .dilation = {1, 3}}) != nothing_thrown);
    CHECK(refusal({.grid = {8, 0}, .window = {3, 3}}) == "neighborhood: rule of the grid 8 x 0 and the window 3 x 3 has a number below 1");
    CHECK(refusal({.grid = {8, 8}, .window = {3, 3}, .tile = {3, 4}}) ==
          "neighborhood: rule of the grid 8 x 8 and the window 3 x 3 has a tile 3 x 4 that does not divide the grid");
    CHECK(refusal({.grid = {farthest_position, 8}, .window = {3, 3}}) != nothing_thrown);
    CHECK(refusal({.grid = {1 << 20, 1 << 20}, .window = {3, 3}}) != nothing_thrown);
    const neighborhood p(neighborhood_rule<2>{.grid = {8, 8}, .window = {3, 3}});
    const auto at = [&](index_t first, index_t end) {
        return error_of([&] { check(p, {.operation = "x", .first_query = first, .end_query = end, .first_key = 0, .end_key = 64}); });
    };
    CHECK(at(0, 64) == nothing_thrown);
    CHECK(at(1, 65) == "x: pattern neighborhood{8 x 8, 3 x 3} is for queries 0 .. 63, not 1 .. 64");
}

} // namespace attn::testing
