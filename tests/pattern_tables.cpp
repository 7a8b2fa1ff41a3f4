// Patterns with a memory: masks, segments, blocks.
#include "catch.hpp"
#include "errors.hpp"
#include "pattern_checks.hpp"

#include <attn/core/tensor.hpp>
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/pattern/tiles.hpp>

#include <memory>

namespace {

using attn::index_t;
using pattern_checks::pick;
using pattern_checks::problem;

struct bool_tensor {
    attn::shape shape;
    std::unique_ptr<bool[]> values;

    bool_tensor(const attn::shape& s, std::mt19937& random, double share)
        : shape(s), values(std::make_unique<bool[]>(static_cast<std::size_t>(s.size()))) {
        for (index_t k = 0; k < s.size(); ++k) values[static_cast<std::size_t>(k)] = std::bernoulli_distribution(share)(random);
    }
    attn::tensor_view<const bool> view() const { return attn::head_major<const bool>(values.get(), shape); }
};

// Agreement with a formula, ranges and lanes on random boxes, and the schedule, alone and in a residue class.
void check_table(const auto& p, const auto& formula, const problem& x, std::mt19937& random) {
    index_t differing = 0;
    for (index_t i = 0; i < x.queries; ++i)
        for (index_t j = 0; j < x.keys; ++j) differing += p.visible(x.first_query + i, x.first_key + j) != formula(i, j);
    CHECK(differing == 0);
    pattern_checks::verdict found;
    for (int k = 0; k < 200 && x.queries > 0 && x.keys > 0; ++k) {
        const auto row = pick(random, 0, x.queries - 1), column = pick(random, 0, x.keys - 1), step = pick(random, 1, 3);
        const auto queries = std::min<index_t>(pick(random, 1, 64), (x.queries - 1 - row) / step + 1);
        const auto keys = std::min<index_t>(pick(random, 1, 40), (x.keys - 1 - column) / step + 1);
        pattern_checks::check_box(p, {x.first_query + row, queries, step}, {x.first_key + column, keys, step, false}, found);
    }
    CHECK(found.wrong == 0);
    CHECK(pattern_checks::schedule_offences(p, x) == 0);
    CHECK(pattern_checks::schedule_offences(attn::causal{} & p, x) == 0);
    CHECK(pattern_checks::schedule_offences(p & attn::pattern::strided{5}, x) == 0);
}

TEST_CASE("tiles of a mask tensor", "[pattern][portable]") {
    std::mt19937 random(3);
    for (const auto& [n, m] : {std::pair<index_t, index_t>{1, 1}, {16, 8}, {15, 9}, {64, 64}, {65, 7}, {97, 131}, {130, 200}})
        for (const double share : {0.0, 0.03, 0.5, 0.97, 1.0}) {
            const bool_tensor mask({2, 3, n, m}, random, share);
            const attn::pattern::tiles table(mask.view(), 4, -3);
            const auto batch = pick(random, 0, 1), head = pick(random, 0, 2);
            const auto values = mask.view();
            check_table(table.at(batch, head), [&](index_t i, index_t j) { return values(batch, head, i, j); }, {4, n, -3, m, 16, 8}, random);
        }
}

TEST_CASE("tiles of part of a mask, broadcast, strided", "[pattern]") {
    std::mt19937 random(5);
    const bool_tensor mask({2, 2, 90, 70}, random, 0.4);
    const auto v = mask.view();
    const attn::pattern::tiles whole(v);
    check_table(whole.at(1, 0), [&](index_t i, index_t j) { return v(1, 0, i + 33, j + 5); }, {33, 40, 5, 60, 16, 8}, random);

    auto strides = v.strides();
    std::swap(strides.tokens, strides.channels);
    const attn::tensor_view<const bool> transposed(v.data(), {2, 2, 70, 90}, strides);
    check_table(attn::pattern::tiles(transposed).at(0, 1), [&](index_t i, index_t j) { return v(0, 1, j, i); }, {0, 70, 0, 90, 32, 8}, random);

    const attn::tensor_view<const bool> one_head(v.data(), {2, 1, 90, 70}, v.strides());
    check_table(attn::pattern::tiles(one_head).at(1, 5), [&](index_t i, index_t j) { return v(1, 0, i, j); }, {0, 90, 0, 70, 16, 8}, random);

    const attn::tensor_view<const bool> repeated(v.data(), {7, 9, 90, 70}, {0, 0, v.strides().tokens, 1});
    check_table(attn::pattern::tiles(repeated).at(6, 8), [&](index_t i, index_t j) { return v(0, 0, i, j); }, {0, 90, 0, 70, 64, 8}, random);

    const attn::tensor_view<const bool> keys_only(v.data(), {2, 1, 1, 70}, v.strides());
    check_table(attn::pattern::tiles(keys_only).at(1, 1), [&](index_t, index_t j) { return v(1, 0, 0, j); }, {-1000, 50, 0, 70, 16, 8}, random);
}

TEST_CASE("tiles of an opaque function", "[pattern]") {
    std::mt19937 random(6);
    const std::vector<int> parts{0, 0, 1, 2, 2, 2, 1, 0, 3, 3};
    const auto part = [&](index_t k) { return parts[static_cast<std::size_t>(k / 7)]; };
    const attn::pattern::tiles table([&](index_t i, index_t j) { return part(i) == part(j); }, 70, 66);
    check_table(table.at(0, 0), [&](index_t i, index_t j) { return part(i) == part(j); }, {0, 70, 0, 66, 16, 8}, random);
    const attn::pattern::tiles shifted([](index_t i, index_t j) { return i + j == 10; }, 20, 20, -5, 3);
    check_table(shifted.at(0, 0), [](index_t i, index_t j) { return i - 5 + j + 3 == 10; }, {-5, 20, 3, 20, 16, 8}, random);
}

TEST_CASE("aligned tiles are skipped or full where they can be", "[pattern]") {
    const index_t n = 256;
    const attn::pattern::tiles banded([](index_t i, index_t j) { return i / 16 * 16 <= j && j < i / 16 * 16 + 40; }, n, n);
    index_t visited = 0;
    for (index_t t = 0; t < attn::tile_count(n, 16); ++t)
        attn::for_each_run(banded.at(0, 0), attn::tile_at(t, 0, n, 16), 0, n, 8, [&](const attn::key_run& run) {
            CHECK(run.full);
            visited += run.count;
        });
    CHECK(visited == 40 * 16 - 24 - 8);
}

TEST_CASE("segments of packed sequences", "[pattern][portable]") {
    std::mt19937 random(8);
    for (const index_t n : {1, 50, 256, 257, 700}) {
        std::vector<std::int32_t> ids;
        while (std::ssize(ids) < n) ids.insert(ids.end(), static_cast<std::size_t>(pick(random, 1, 60)), static_cast<std::int32_t>(ids.size()));
        ids.resize(static_cast<std::size_t>(n));
        const attn::segments packed(ids, 1, 10);
        const auto id = [&](index_t k) { return ids[static_cast<std::size_t>(k)]; };
        check_table(packed.at(0, 3), [&](index_t i, index_t j) { return id(i) == id(j); }, {10, n, 10, n, 16, 8}, random);
    }
}

TEST_CASE("tiles are repeated over images, at positions of their own for each entry", "[pattern]") {
    attn::tensor<bool> mask({2, 1, 20, 9});
    std::mt19937 random(3);
    for (attn::index_t e = 0; e < mask.shape().size(); ++e) mask.data()[e] = random() % 2 == 0;
    const std::vector<attn::index_t> queries{10, -20}, keys{0, 5, 7, 900};
    const attn::pattern::tiles pattern(mask, queries, keys);
    for (attn::index_t b = 0; b < 4; ++b) {
        const auto q = queries[static_cast<std::size_t>(b % 2)], k = keys[static_cast<std::size_t>(b)];
        index_t wrong = 0;
        for (index_t i = 0; i < 20; ++i)
            for (index_t j = 0; j < 9; ++j) wrong += pattern.at(b, 0).visible(q + i, k + j) != mask(b % 2, 0, i, j);
        CHECK(wrong == 0);
    }
    const std::vector<index_t> at{12, -18, 10, -20};
    attn::pattern_context context{.operation = "x", .batch = 4, .heads = 1, .where = {.first_query = at, .first_key = keys}, .queries = 18, .keys = 9};
    const auto refusal = [&](const auto& p) { return attn::testing::error_of([&] { check(p, context); }); };
    CHECK(refusal(pattern) == attn::testing::nothing_thrown);
    context.queries = 19;
    CHECK(refusal(pattern) == "x: pattern tiles{(2, 1, 20, 9)} is for queries 10 .. 29, not 12 .. 30");
    context.queries = 18;
    context.batch = 3;
    CHECK(refusal(pattern) == "x: pattern tiles{(2, 1, 20, 9)} is for another batch than 3");
    const std::vector<index_t> three(3), none;
    context.batch = 4;
    CHECK(refusal(attn::pattern::tiles(mask, three)) == "x: pattern tiles{(2, 1, 20, 9)} has 3 positions for a batch of 4");
    CHECK(attn::testing::error_of([&] { attn::pattern::tiles(mask, none); }) == "tiles: first_query has no number");
}

TEST_CASE("segments in any order, of queries and keys, by batch entry", "[pattern]") {
    std::mt19937 random(9);
    const index_t entries = 3, n = 49, m = 60;
    std::vector<std::int32_t> queries, keys;
    for (index_t k = 0; k < entries * n; ++k) queries.push_back(static_cast<std::int32_t>(pick(random, -1, 2)));
    for (index_t k = 0; k < entries * m; ++k) keys.push_back(static_cast<std::int32_t>(pick(random, -1, 2)));
    const attn::segments windows(queries, keys, entries, 2, -4);
    for (index_t batch = 0; batch < 2 * entries; ++batch) {
        const auto entry = batch % entries;
        const auto formula = [&](index_t i, index_t j) {
            return queries[static_cast<std::size_t>(entry * n + i)] == keys[static_cast<std::size_t>(entry * m + j)];
        };
        check_table(windows.at(batch, 0), formula, {2, n, -4, m, 16, 8}, random);
    }
}

TEST_CASE("the schedule of packed sequences visits little else", "[pattern]") {
    std::vector<std::int32_t> ids(16384);
    for (std::size_t k = 0; k < ids.size(); ++k) ids[k] = static_cast<std::int32_t>(k / 500);
    const auto pairs = attn::visited_pairs(attn::segments(ids).at(0, 0), 0, 16384, 0, 16384, 16, 8);
    CHECK(static_cast<double>(pairs.visible) >= 0.95 * static_cast<double>(pairs.visited));
}

TEST_CASE("block-sparse layouts", "[pattern][portable]") {
    std::mt19937 random(10);
    const bool_tensor blocks({2, 3, 7, 9}, random, 0.4);
    const auto v = blocks.view();
    for (const index_t size : {1, 5, 16})
        for (const index_t key_size : {3, 8}) {
            const attn::pattern::block_sparse p{v, size, key_size};
            check_table(p.at(1, 2), [&](index_t i, index_t j) { return v(1, 2, i / size, j / key_size); },
                        {0, 7 * size, 0, std::min<index_t>(9 * key_size, 70), 16, 8}, random);
        }
    const attn::tensor_view<const bool> shared(v.data(), {1, 1, 7, 9}, v.strides());
    check_table(attn::pattern::block_sparse{shared, 10}.at(1, 2), [&](index_t i, index_t j) { return v(0, 0, (i + 3) / 10, (j + 8) / 10); },
                {3, 60, 8, 80, 16, 8}, random);
}

} // namespace
