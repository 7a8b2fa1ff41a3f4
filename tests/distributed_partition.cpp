// Who holds which queries and keys, and the pairs and bytes that a partition promises, against counts.
#include "catch.hpp"
#include "errors.hpp"

#include <Eigen/Core>
#include <attn/distributed/partition.hpp>
#include <attn/pattern/block_diagonal.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/segments.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

input_shapes square(index_t n, index_t heads = 1, index_t batch = 1) {
    return {{batch, heads, n, 8}, {batch, heads, n, 8}, {batch, heads, n, 4}};
}

/// The ranks' parts follow each other, and their pairs are those counted one by one.
void check_counts(const auto& p, const input_shapes& s, index_t ranks, const positions& where = {}) {
    const partition parts(p, s, ranks, where);
    CHECK(parts.ranks() == ranks);
    index_t query = 0, key = 0;
    for (index_t r = 0; r < ranks; ++r) {
        CAPTURE(r);
        CHECK(parts.queries(r).first == query);
        CHECK(parts.keys(r).first == key);
        query = parts.queries(r).end(), key = parts.keys(r).end();
        index_t pairs = 0;
        for (index_t b = 0; b < s.queries.batch; ++b)
            for (index_t h = 0; h < s.queries.heads; ++h)
                for (index_t i = parts.queries(r).first; i < query; ++i)
                    for (index_t j = 0; j < s.keys.tokens; ++j) pairs += bool(at(p, b, h).visible(where.first_query[b] + i, where.first_key[b] + j));
        CHECK(parts.pairs(r) == pairs);
    }
    CHECK(query == s.queries.tokens);
    CHECK(key == s.keys.tokens);
}

/// The largest share of the pairs, times the ranks.
double imbalance(const partition& parts) {
    index_t most = 0, all = 0;
    for (index_t r = 0; r < parts.ranks(); ++r) {
        most = std::max(most, parts.pairs(r));
        all += parts.pairs(r);
    }
    return static_cast<double>(most * parts.ranks()) / static_cast<double>(all);
}

/// Keys that some query of the rank sees, and that it does not hold.
index_t keys_received(const auto& p, const partition& parts, index_t rank) {
    const auto own = parts.queries(rank), held = parts.keys(rank);
    index_t count = 0;
    for (index_t j = 0; j < parts.shapes().keys.tokens; ++j) {
        bool seen = false;
        for (index_t i = own.first; i < own.end() && !seen; ++i) seen = p.visible(i, j);
        count += seen && (j < held.first || j >= held.end());
    }
    return count;
}

} // namespace

TEST_CASE("partition: parts follow each other, and their pairs are counted exactly", "[distributed][portable]") {
    for (const index_t n : {0, 1, 2, 97, 300})
        for (const index_t ranks : {1, 2, 3, 7, 64}) {
            CAPTURE(n, ranks);
            check_counts(causal{}, square(n), ranks);
            check_counts(causal{} & (local{9} | strided{11}), square(n, 2), ranks);
            check_counts(predicate{[](auto, auto) { return false; }}, square(n), ranks);
        }
    const std::vector<index_t> lengths_of{30, 97};
    check_counts(lengths{lengths_of} & causal{}, square(97, 2, 2), 5);
    check_counts((on_heads{0, 1} & local{9}) | (on_heads{1, 2} & strided{5}), square(130, 2), 5);
    check_counts(causal{}, {{1, 2, 40, 8}, {1, 1, 130, 8}, {1, 1, 130, 8}}, 4, bottom_right(40, 130));
    check_counts(local{7}, {{1, 2, 130, 8}, {1, 1, 50, 8}, {1, 1, 50, 8}}, 4, {.first_query = -20, .first_key = 17});
}

TEST_CASE("partition: causal, windowed and packed sequences are balanced on 2 to 64 ranks", "[distributed]") {
    std::vector<std::int32_t> documents;
    for (std::int32_t id = 0; documents.size() < 16384; ++id) documents.insert(documents.end(), static_cast<std::size_t>(100 + 997 * id % 1500), id);
    documents.resize(16384);
    for (index_t ranks = 2; ranks <= 64; ++ranks) {
        CAPTURE(ranks);
        CHECK(imbalance({causal{}, square(16384), ranks}) <= 1.05);
        CHECK(imbalance({causal{} & local{500}, square(16384), ranks}) <= 1.05);
        if (ranks % 9 == 1) CHECK(imbalance({segments(documents), square(16384), ranks}) <= 1.05);
    }
    CHECK(imbalance({causal{}, square(1'000'000), 1024}) <= 1.05);
}

TEST_CASE("partition: a window sends its width, documents stay at home, all keys go round those who are as fast", "[distributed]") {
    const index_t n = 20'000, ranks = 5, numbers = 8 + 4;
    const auto each = [&](const auto& p, const auto& f) {
        const partition parts(p, square(n), ranks);
        index_t sent = 0, received = 0;
        for (index_t r = 0; r < ranks; ++r) {
            f(parts, r);
            CHECK(parts.bytes_received<float>(r) == 4 * numbers * keys_received(p, parts, r));
            CHECK(parts.bytes_sent<double>(r) == 2 * parts.bytes_sent<float>(r));
            CHECK(parts.bytes_sent<Eigen::bfloat16>(r) * 2 == parts.bytes_sent<float>(r));
            sent += parts.bytes_sent(r), received += parts.bytes_received(r);
        }
        CHECK(sent == received);
    };
    each(causal{} & local{300}, [&](const partition& parts, index_t r) {
        CHECK(parts.bytes_received(r) == (r == 0 ? 0 : 4 * numbers * 300));
        CHECK(parts.bytes_sent(r) == (r == ranks - 1 ? 0 : 4 * numbers * 300));
    });
    each(local{300}, [&](const partition& parts, index_t r) { CHECK(parts.bytes_sent(r) == 4 * numbers * 300 * (r == 0 || r == ranks - 1 ? 1 : 2)); });
    each(block_diagonal{n / ranks}, [&](const partition& parts, index_t r) { CHECK(parts.bytes_sent(r) == 0); });
    each(dense{}, [&](const partition& parts, index_t r) { // in a ring none sends more than all but one part
        CHECK(parts.bytes_received(r) == 4 * numbers * (n - parts.keys(r).count));
        CHECK(parts.bytes_sent(r) == 4 * numbers * (n - parts.keys((r + 1) % ranks).count));
    });
    each(causal{}, [&](const partition& parts, index_t r) {
        CHECK(parts.bytes_received(r) == 4 * numbers * parts.queries(r).first);
        // Each has fewer queries than the one before, and its keys from who holds them: passed on they would come at the pace of the slowest.
        CHECK(parts.bytes_sent(r) == 4 * numbers * parts.keys(r).count * (ranks - 1 - r));
    });
    const std::vector<index_t> even{0, 4'000, 8'000, 12'000, 16'000, 20'000};
    const partition alike(causal{}, square(n), even, even); // these pass them on
    for (index_t r = 0; r < ranks; ++r) CHECK(alike.bytes_sent(r) == (r == ranks - 1 ? 0 : 4 * numbers * alike.queries(r).end()));
    each(global{10} & local{n}, [](const partition&, index_t) {});
}

TEST_CASE("partition: what does not fit is refused", "[distributed]") {
    const std::vector<index_t> each{0, 1};
    CHECK(error_of([] { partition(dense{}, square(10), 0); }) == "partition: ranks must be at least 1, not 0");
    CHECK(error_of([&] { partition(dense{}, square(10, 1, 2), 2, {.first_query = each}); }) ==
          "partition: positions are given for each batch entry, but ranks hold the same tokens of all");
    check_says(error_of([] { partition(strided{0}, square(10), 2); }), {"partition", "strided{0}"});
    check_says(error_of([] { partition(dense{}, {{1, 1, -1, 8}, {1, 1, 10, 8}, {1, 1, 10, 8}}, 2); }), {"partition", "q", "negative"});
    check_says(error_of([] { partition(dense{}, {{1, 1, 9, 8}, {1, 1, 10, 8}, {1, 1, 11, 8}}, 2); }), {"partition", "v", "the tokens differ"});
    check_says(error_of([] { partition(dense{}, square(10), 2, {.first_query = farthest_position}); }), {"partition", "positions.first_query"});
    const input_shapes crossed{{1, 1, 9, 8}, {1, 1, 10, 8}, {1, 1, 10, 8}};
    check_says(error_of([&] { partition(causal{}, crossed, 2); }), {"partition: positions are not given, but q has 9 tokens and k 10, and the pattern"});
    CHECK(error_of([&] { partition(causal{}, crossed, 2, top_left()); }) == nothing_thrown);
    const std::vector<index_t> beyond{11};
    check_says(error_of([&] { partition(lengths{beyond}, crossed, 2); }), {"partition: pattern lengths{1 values} holds the length 11, but there are 10 keys"});
    const auto cuts = [](std::vector<index_t> queries, std::vector<index_t> keys) { partition(dense{}, square(10), std::move(queries), std::move(keys)); };
    CHECK(error_of([&] { cuts({0, 5, 10}, {0, 0, 10}); }) == nothing_thrown);
    check_says(error_of([&] { cuts({0, 5, 9}, {0, 5, 10}); }), {"partition: query_cuts must rise from 0 to the 10 tokens"});
    check_says(error_of([&] { cuts({0, 5, 10}, {0, 11, 10}); }), {"partition: key_cuts must rise from 0 to the 10 tokens"});
    check_says(error_of([&] { cuts({0, 5, 10}, {0, 10}); }), {"partition: key_cuts are 2, but query_cuts are 3"});
}

} // namespace attn::testing
