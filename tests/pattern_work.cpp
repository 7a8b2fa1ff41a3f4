// How much a schedule visits.
#include "catch.hpp"

#include <attn/pattern/causal.hpp>
#include <attn/pattern/fixed.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/passes.hpp>

#include <cmath>

namespace {

using attn::index_t;

attn::pair_count pairs_of(const auto& p, index_t n) { return attn::visited_pairs(p, 0, n, 0, n, 16, 8); }

double useful(const auto& p, index_t n) {
    const auto pairs = pairs_of(p, n);
    return static_cast<double>(pairs.visible) / static_cast<double>(pairs.visited);
}

TEST_CASE("visible pairs are counted exactly", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    for (attn::index_t n : {0, 1, 7, 64, 97, 130}) {
        const auto p = causal{} & (local{9} | strided{11});
        attn::index_t visible = 0;
        for (attn::index_t i = 0; i < n; ++i)
            for (attn::index_t j = 0; j < n; ++j) visible += p.visible(i, j);
        CHECK(pairs_of(p, n).visible == visible);
    }
    CHECK(pairs_of(dense{}, 1000).visited == 1000 * 1000);
    // A union counts a key once: window and stride overlap in the diagonal.
    CHECK(pairs_of(local{0} | strided{10}, 1000).visible == 1000 * 100);
    const auto cross = visited_pairs(causal{}, 500, 20, 100, 1000, 16, 8);
    CHECK(cross.visible == 20 * 400 + 20 * 21 / 2);
}

TEST_CASE("sparse patterns visit few pairs", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    for (attn::index_t n : {1024, 4096, 16384, 65536}) {
        CAPTURE(n);
        for (attn::index_t w : {16, 128}) CHECK(pairs_of(local{w}, n).visited <= n * (2 * w + 1 + 32));
        for (attn::index_t s : {64, 128}) CHECK(pairs_of(strided{s}, n).visited == n * n / s);
        const auto root = static_cast<attn::index_t>(std::lround(std::sqrt(static_cast<double>(n))));
        CHECK(pairs_of(causal{} & (local{root - 1} | strided{root}), n).visited <= n * (2 * root + 32));
        CHECK(pairs_of(local{root} | strided{root}, n).visited <= 4 * n * root);
        CHECK(pairs_of(causal{} & fixed{root, 8}, n).visited <= 6 * n * root);
    }
}

TEST_CASE("most of what is visited is useful", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    const attn::index_t n = 16384, root = 128;
    CHECK(useful(causal{} & (local{root - 1} | strided{root}), n) >= 0.88);
    CHECK(useful(local{root} | strided{root}, n) >= 0.95);
    CHECK(useful(causal{} & fixed{root, 8}, n) >= 0.95);
    CHECK(useful(local{128} | strided{64}, n) >= 0.85);
    CHECK(useful(local{128}, n) >= 0.85);
    CHECK(useful((causal{} & (local{root - 1} | strided{root})) | global{4}, n) >= 0.8); // a union inside an intersection inside a union
    CHECK(useful(strided{64}, n) == 1.0);
    const auto heads = (on_heads{0, 1} & local{128}) | (on_heads{1, 2} & strided{64});
    CHECK(pairs_of(at(heads, 0, 0), n).visited == pairs_of(local{128}, n).visited);
    CHECK(pairs_of(at(heads, 0, 1), n).visited == pairs_of(strided{64}, n).visited);
}

} // namespace
