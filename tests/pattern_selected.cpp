// Selected key blocks, and the table that block means make.
#include "catch.hpp"
#include "errors.hpp"
#include "pattern_checks.hpp"
#include "problems.hpp"

#include <attn/attention/select_blocks.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/passes.hpp>

namespace attn::testing {

using namespace pattern;

TEST_CASE("selected: a query sees the blocks in its block's list", "[pattern]") {
    tensor<index_t> table({2, 3, 4, 3});
    std::mt19937 random(7);
    for (index_t row = 0; row < 2 * 3 * 4; ++row) {
        std::array<index_t, 6> blocks{0, 1, 2, 3, 4, -1};
        std::shuffle(blocks.begin(), blocks.end(), random);
        std::copy_n(blocks.begin(), 3, table.data() + row * 3);
    }
    const selected p(table, 5, 4);
    index_t wrong = 0;
    for (index_t b = 0; b < 4; ++b)
        for (index_t h = 0; h < 3; ++h) {
            const auto own = p.at(b, h);
            for (index_t i = 0; i < 20; ++i)
                for (index_t j = 0; j < 30; ++j) {
                    bool listed = false;
                    for (index_t e = 0; e < 3; ++e) listed = listed || table(b % 2, h, i / 5, e) == j / 4;
                    wrong += own.visible(i, j) != listed;
                }
            const auto found = pattern_checks::check_boxes(own, 0, 20);
            CHECK(found.wrong == 0);
            CHECK(static_cast<double>(found.undecided) <= 0.1 * static_cast<double>(found.boxes));
        }
    CHECK(wrong == 0);
    CHECK(p.heads_alike() == false);
}

TEST_CASE("selected: the cost follows the lists", "[pattern]") {
    const index_t n = 8192, block = 64, count = 4;
    tensor<index_t> table({1, 1, n / block, count});
    for (index_t u = 0; u < n / block; ++u)
        for (index_t e = 0; e < count; ++e) table(0, 0, u, e) = (u * 37 + e * 29) % (n / block);
    const auto own = selected(table, block).at(0, 0);
    const auto pairs = visited_pairs(own, 0, n, 0, n, 16, 8);
    CHECK(pairs.visible == n * count * block);
    CHECK(pairs.visited == pairs.visible);
}

TEST_CASE("selected: refuses what is no table", "[pattern]") {
    tensor<index_t> table({1, 1, 2, 2});
    CHECK(error_of([&] { selected(table, 4); }) == "selected: table names block 0 twice for query block 0");
    for (index_t e = 0; e < 4; ++e) table.data()[e] = e - 2;
    CHECK(error_of([&] { selected(table, 4); }) == nothing_thrown);
    CHECK(error_of([&] { selected(table, 4, 0); }) == "selected: blocks are of 4 queries and 0 keys: 1 at least is needed");
    CHECK(error_of([] { selected(tensor_view<const index_t>(nullptr, {1, 1, 2, 2}, {}), 4); }) != nothing_thrown);
    const selected p(table, 4);
    const auto at = [&](index_t batch, index_t heads, index_t first_query, index_t end_query) {
        return error_of([&] {
            check(p, {.operation = "x", .batch = batch, .heads = heads, .first_query = first_query, .end_query = end_query, .first_key = 0, .end_key = 1000});
        });
    };
    CHECK(at(5, 3, 0, 8) == nothing_thrown);
    CHECK(at(5, 3, 1, 9) == "x: pattern selected{(1, 1, 2, 2), 4, 4} is for queries 0 .. 7, not 1 .. 8");
    CHECK(at(5, 3, -1, 3) != nothing_thrown);
}

TEST_CASE("select_blocks: the blocks whose means score highest, the queries' own among them", "[pattern]") {
    const index_t n = 37, m = 50, d = 6, first = 13;
    const auto q = random_tensor<float>({2, 4, n, d}, 1), k = random_tensor<float>({2, 2, m, d}, 2);
    for (const bool causal : {false, true}) {
        const block_selection rule{.query_block = 8, .key_block = 4, .count = 5, .causal = causal};
        const auto table = select_blocks(q, k, rule, first);
        REQUIRE(table.shape() == shape{2, 4, (first + n + 7) / 8, 5});
        for (index_t b = 0; b < 2; ++b)
            for (index_t h = 0; h < 4; ++h)
                for (index_t u = 0; u < table.shape().tokens; ++u) {
                    // By its formula: scores of all blocks, sorted.
                    const auto last = std::min(first + n, (u + 1) * 8) - 1;
                    std::vector<std::pair<double, index_t>> scored;
                    for (index_t w = 0; w * 4 < m; ++w) {
                        if (u * 8 + 8 <= first || (causal && w * 4 > last)) continue;
                        double score = 0;
                        for (index_t c = 0; c < d; ++c) {
                            double of_q = 0, of_k = 0, queries = 0, keys = 0;
                            for (index_t i = 0; i < n; ++i)
                                if ((first + i) / 8 == u) of_q += static_cast<double>(q(b, h, i, c)), ++queries;
                            for (index_t j = 0; j < m; ++j)
                                if (j / 4 == w) of_k += static_cast<double>(k(b, h / 2, j, c)), ++keys;
                            score += of_q / queries * of_k / keys;
                        }
                        scored.push_back({causal && last / 4 == w ? -1e9 : -score, w});
                    }
                    std::sort(scored.begin(), scored.end());
                    for (index_t e = 0; e < 5; ++e)
                        CHECK(table(b, h, u, e) == (e < std::ssize(scored) ? scored[static_cast<std::size_t>(e)].second : -1));
                }
        // What it is for.
        const softmax_attention op{.pattern = selected(table, 8, 4)};
        CHECK(error_of([&] { (void)attend(op, q, k, k, {.first_query = first}); }) == nothing_thrown);
    }
    CHECK(error_of([&] { (void)select_blocks(q, random_tensor<float>({2, 3, m, d}, 2)); }) ==
          "select_blocks: k has shape (2, 3, 50, 6), but q has (2, 4, 37, 6): batch, heads or channels do not fit");
    CHECK(error_of([&] { (void)select_blocks(q, k, {.count = 0}); }) == "select_blocks: rule has a number below 1");
    CHECK(error_of([&] { (void)select_blocks(q, k, {}, -1); }) == "select_blocks: first_query is -1, but blocks are counted from 0");
    auto broken = random_tensor<float>({1, 1, 8, 2}, 3);
    broken(0, 0, 2, 0) = std::numeric_limits<float>::quiet_NaN();
    const auto table = select_blocks(broken, broken, {.query_block = 4, .key_block = 2, .count = 2, .causal = false});
    CHECK(table(0, 0, 1, 0) != 1); // the block that holds NaN comes last
    CHECK(table(0, 0, 1, 1) != 1);
    CHECK(select_blocks(tensor<float>({1, 1, 0, 2}), broken).shape() == shape{1, 1, 0, 8});
    CHECK(select_blocks(broken, tensor<float>({1, 1, 0, 2}))(0, 0, 0, 0) == -1);
}

} // namespace attn::testing
