#include "catch.hpp"
#include "pattern_checks.hpp"

#include <attn/pattern/causal.hpp>
#include <attn/pattern/dilated_window.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/strided.hpp>

namespace {

using attn::index_t;

std::vector<attn::key_run> runs_of(const auto& p, const attn::query_tile& tile, index_t keys) {
    std::vector<attn::key_run> runs;
    attn::for_each_run(p, tile, 0, keys, 8, [&](const attn::key_run& run) { runs.push_back(run); });
    return runs;
}

bool same(const attn::key_run& run, index_t first, index_t count, index_t step, bool full) {
    return run.first == first && run.count == count && run.step == step && run.full == full;
}

TEST_CASE("tiles cover every query once", "[pattern]") {
    index_t wrong = 0;
    for (index_t n = 0; n < 40; ++n)
        for (index_t step = 1; step < 12; ++step)
            for (index_t tile : {1, 2, 4, 16}) {
                std::vector<int> met(static_cast<std::size_t>(n));
                for (index_t t = 0; t < attn::tile_count(n, tile, step); ++t) {
                    const auto rows = attn::tile_at(t, -5, n, tile, step);
                    wrong += rows.count < 1 || rows.count > tile || rows.step != step;
                    for (index_t k = 0; k < rows.count; ++k) ++met.at(static_cast<std::size_t>(rows.first + 5 + k * step));
                }
                for (const auto times : met) wrong += times != 1;
            }
    CHECK(wrong == 0);
}

TEST_CASE("neighbouring runs are one run", "[pattern]") {
    const auto whole = runs_of(attn::dense{}, {32, 16, 1}, 1000);
    REQUIRE(whole.size() == 1);
    CHECK(same(whole[0], 0, 1000, 1, true));

    const auto past = runs_of(attn::causal{}, {480, 16, 1}, 1000);
    REQUIRE(past.size() == 2);
    CHECK(same(past[0], 0, 480, 1, true));
    CHECK(same(past[1], 480, 16, 1, false));

    const auto window = runs_of(attn::pattern::local{100}, {480, 16, 1}, 1000);
    REQUIRE(window.size() == 3);
    CHECK(same(window[1], 400, 176, 1, true));

    const auto column = runs_of(attn::pattern::strided{10}, {3, 16, 10}, 1000);
    REQUIRE(column.size() == 1);
    CHECK(same(column[0], 3, 100, 10, true));

    CHECK(runs_of(!attn::dense{}, {0, 16, 1}, 1000).empty());
    CHECK(runs_of(attn::dense{}, {0, 16, 1}, 0).empty());
}

TEST_CASE("a union is disjoint passes", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    std::vector<attn::index_t> steps;
    const auto steps_of = [&](const auto& p) {
        steps.clear();
        for_each_pass(p, 0, 100, 0, 100, [&](const auto&, attn::index_t step) { steps.push_back(step); });
        return steps;
    };
    using list = std::vector<attn::index_t>;
    CHECK(steps_of(causal{} & local{5}) == list{1});
    CHECK(steps_of(causal{} & strided{7}) == list{7});
    CHECK(steps_of(causal{} & (local{5} | strided{7})) == list{1, 7});
    CHECK(steps_of(strided{7} | local{5} | global{2}) == list{1, 7});
    CHECK(steps_of(local{5} | strided{1}) == list{1});
    CHECK(steps_of(strided{4} | dilated_window{3, 4}) == list{4});
    CHECK(steps_of(strided{4} | dilated_window{3, 6} | causal{}) == list{1, 4, 6});
    const auto by_head = (on_heads{0, 2} & local{5}) | (on_heads{2, 4} & strided{6});
    static_assert(max_passes<decltype(by_head)> == 2);
    static_assert(max_passes<decltype(causal{} & local{5})> == 1);
    CHECK(steps_of(at(by_head, 0, 1)) == list{1});
    CHECK(steps_of(at(by_head, 0, 2)) == list{6});
    CHECK(steps_of(at(by_head, 0, 5)) == list{1});
    CHECK(steps_of(local{0} & !local{3}) == list{1});
    const auto three = (on_heads{0, 1} & strided{4}) | strided{6} | local{2};
    CHECK(steps_of(at(three, 0, 0)) == list{1, 4, 6});
    CHECK(steps_of(at(three, 0, 1)) == list{1, 6});
}

} // namespace
