// Every pattern's text on the three arithmetics, all small boxes, positions below zero included.
#include "catch.hpp"
#include "pattern_checks.hpp"

#include <attn/pattern/block_diagonal.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/dilated_window.hpp>
#include <attn/pattern/fixed.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/lengths.hpp>

namespace {

using attn::index_t;

// Claims must be right; how many boxes ranges cannot decide is kept from growing.
void check_pattern(const auto& p, const auto& formula, double max_undecided) {
    index_t differing = 0;
    for (index_t i = -15; i < 25; ++i)
        for (index_t j = -15; j < 25; ++j) differing += p.visible(i, j) != formula(i, j);
    CHECK(differing == 0);
    const auto found = pattern_checks::check_boxes(p, -9, 9);
    CHECK(found.boxes > 10000);
    CHECK(found.wrong == 0);
    CHECK(static_cast<double>(found.undecided) <= max_undecided * static_cast<double>(found.boxes));
}

index_t floored(index_t a, index_t c) { return (a >= 0 ? a : a - c + 1) / c; }

TEST_CASE("patterns mean their formulas on integers, ranges and lanes", "[pattern][portable]") {
    check_pattern(attn::dense{}, [](index_t, index_t) { return true; }, 0);
    check_pattern(attn::causal{}, [](index_t i, index_t j) { return j <= i; }, 0);
    check_pattern(attn::pattern::local{3}, [](index_t i, index_t j) { return std::abs(i - j) <= 3; }, 0);
    check_pattern(attn::pattern::local{4, 1}, [](index_t i, index_t j) { return i - 4 <= j && j <= i + 1; }, 0);
    check_pattern(attn::pattern::strided{5}, [](index_t i, index_t j) { return std::abs(i - j) % 5 == 0; }, 0.09);
    check_pattern(attn::pattern::strided{1}, [](index_t, index_t) { return true; }, 0);
    check_pattern(attn::pattern::block_diagonal{4}, [](index_t i, index_t j) { return floored(i, 4) == floored(j, 4); }, 0);
    check_pattern(attn::pattern::global{2}, [](index_t i, index_t j) { return i < 2 || j < 2; }, 0);
    check_pattern(attn::pattern::prefix{3}, [](index_t i, index_t j) { return j < 3 || j <= i; }, 0.02);
    check_pattern(attn::pattern::dilated_window{2, 3}, [](index_t i, index_t j) { return std::abs(i - j) <= 6 && (i - j) % 3 == 0; }, 0.06);
    for (index_t sub : {0, 1, 2}) {
        const auto summary = [](index_t j) { return j - 5 * floored(j, 5); };
        check_pattern(attn::pattern::fixed{5, 1, sub},
                      [&](index_t i, index_t j) { return floored(i, 5) == floored(j, 5) || summary(j) == 4 - sub; }, 0.09);
    }
    check_pattern(attn::pattern::fixed{6, 2, 1}, [](index_t i, index_t j) {
        const auto column = j - 6 * floored(j, 6);
        return floored(i, 6) == floored(j, 6) || column == 2 || column == 3;
    }, 0.06);
}

TEST_CASE("operators combine patterns", "[pattern][portable]") {
    using namespace attn;
    using namespace attn::pattern;
    check_pattern(causal{} & local{3}, [](index_t i, index_t j) { return j <= i && i - j <= 3; }, 0);
    check_pattern(local{1} | strided{4}, [](index_t i, index_t j) { return std::abs(i - j) <= 1 || (i - j) % 4 == 0; }, 0.12);
    check_pattern(!causal{}, [](index_t i, index_t j) { return j > i; }, 0);
    check_pattern((!(causal{} & strided{3})) | global{1}, [](index_t i, index_t j) { return !(j <= i && (i - j) % 3 == 0) || i < 1 || j < 1; }, 0.2);
    const index_t l = 4;
    // Child et al.: strided, and fixed with the summary columns of two sub-blocks.
    check_pattern(causal{} & (local{l - 1, 0} | strided{l}), [](index_t i, index_t j) { return j <= i && (i - j < 4 || (i - j) % 4 == 0); }, 0.1);
    check_pattern(causal{} & fixed{l, 2}, [](index_t i, index_t j) { return j <= i && (floored(i, 4) == floored(j, 4) || j - 4 * floored(j, 4) >= 2); }, 0.03);
}

TEST_CASE("a user's lambda is a pattern", "[pattern][portable]") {
    const index_t w = 3;
    check_pattern(attn::pattern::predicate{[w](auto i, auto j) { return j <= i && (i - j < w || j % 4 == 0); }},
                  [](index_t i, index_t j) { return j <= i && (i - j < 3 || j % 4 == 0); }, 0.02);
    check_pattern(attn::pattern::predicate{[](auto i, auto j) { return attn::floor_div(i, 3) >= attn::floor_div(j, 5) || attn::floor_mod(i, 4) == 1; }},
                  [](index_t i, index_t j) { return floored(i, 3) >= floored(j, 5) || i - 4 * floored(i, 4) == 1; }, 0.05);
    check_pattern(attn::pattern::predicate{[](auto i, auto j) { return attn::abs(i - j) / 2 != 1 && 2 * i + 1 > j; }},
                  [](index_t i, index_t j) { return std::abs(i - j) / 2 != 1 && 2 * i + 1 > j; }, 0.1);
}

TEST_CASE("at leaves the pattern of one batch entry and head", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    const std::vector<attn::index_t> length{3, 0, 7};
    const auto p = (causal{} & lengths{length}) | (on_heads{1, 3} & local{1});
    static_assert(Pattern<decltype(p)>);
    for (attn::index_t batch = 0; batch < 3; ++batch)
        for (attn::index_t head = 0; head < 4; ++head) {
            const auto size = length[static_cast<std::size_t>(batch)];
            const bool windowed = head == 1 || head == 2;
            check_pattern(at(p, batch, head),
                          [&](attn::index_t i, attn::index_t j) { return (j <= i && j < size) || (windowed && std::abs(i - j) <= 1); }, 0.05);
        }
    check_pattern(at(!lengths{length}, 0, 0), [](attn::index_t, attn::index_t j) { return j >= 3; }, 0);
}

TEST_CASE("steps combine", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    CHECK(step_of(causal{} & strided{6}) == 6);
    CHECK(step_of(strided{4} & dilated_window{2, 6}) == 12);
    CHECK(step_of(strided{4} | strided{6}) == 2);
    CHECK(step_of(strided{4} | causal{}) == 1);
    CHECK(step_of(!strided{4}) == 1);
    const attn::index_t large = attn::index_t{1} << 40;
    CHECK(step_of(strided{large - 1} & strided{large}) == large);
}

} // namespace
