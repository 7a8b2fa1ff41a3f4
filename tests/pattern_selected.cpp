// Selected key blocks, and the table that block means make.
#include "catch.hpp"
#include "errors.hpp"
#include "pattern_checks.hpp"
#include "problems.hpp"

#include <attn/attention/select_blocks.hpp>
#include <attn/attention/select_tokens.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/passes.hpp>
#include <attn/reference/select_tokens.hpp>
#include <attn/score/additive_bias.hpp>

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

// A bias of -infinity hides a key too, but is of all keys: so these bits are those of blocks from which nothing is left out.
template <class T>
void check_single_keys(const shape& q_shape, index_t kv_heads, index_t keys, index_t listed, index_t table_heads) {
    const auto q = random_tensor<T>(q_shape, 1), k = random_tensor<T>({1, kv_heads, keys, q_shape.channels}, 2),
               v = random_tensor<T>({1, kv_heads, keys, 5}, 3);
    const index_t first = keys - q_shape.tokens;
    tensor<index_t> table({1, table_heads, q_shape.tokens, listed});
    tensor<T> bias({1, table_heads, q_shape.tokens, keys});
    std::fill_n(bias.data(), bias.shape().size(), -std::numeric_limits<T>::infinity());
    std::mt19937 random(4);
    std::vector<index_t> all(static_cast<std::size_t>(keys));
    std::iota(all.begin(), all.end(), index_t{0});
    detail::for_each_row(table.shape(), [&](index_t, index_t h, index_t i) {
        std::shuffle(all.begin(), all.end(), random);
        for (index_t e = 0; e < listed; ++e) {
            const auto j = all[static_cast<std::size_t>(e)];
            table(0, h, i, e) = j;
            if (j <= first + i) bias(0, h, i, j) = T{0};
        }
    });
    const positions where{.first_query = first, .first_key = 0};
    const auto ours = attend(softmax_attention{.pattern = causal{} & selected(table, 1, 1, first)}, inputs<T>{q, k, v, where});
    const auto masked = attend(softmax_attention{.score = additive_bias<T>{bias, first}}, inputs<T>{q, k, v, where});
    index_t different = 0;
    for (index_t e = 0; e < ours.shape().size(); ++e) different += ours.data()[e] != masked.data()[e];
    INFO(to_string(q_shape) << ", " << kv_heads << " heads of " << keys << " keys, of which " << listed);
    CHECK(different == 0);
}

TEMPLATE_TEST_CASE("selected: single keys have the bits of the masked block", "[pattern]", ATTN_TEST_NUMBERS) {
    for (const index_t listed : {1, 9, 100}) {
        check_single_keys<TestType>({1, 8, 1, 20}, 1, 700, listed, 1);   // one query, heads together
        check_single_keys<TestType>({1, 8, 100, 20}, 2, 700, listed, 1); // query by query, heads together
        check_single_keys<TestType>({1, 2, 100, 7}, 2, 300, listed, 2);  // lists of each head
        check_single_keys<TestType>({1, 4, 33, 7}, 1, 130, listed, 4);   // which see all but some
    }
}

TEMPLATE_TEST_CASE("select_tokens: the keys that score highest, of equal ones the earliest", "[pattern]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    // Small whole numbers: sums are exact, and many are equal.
    const auto whole = [](const shape& s, unsigned seed) {
        tensor<T> t(s);
        std::mt19937 random(seed);
        for (index_t e = 0; e < s.size(); ++e) t.data()[e] = static_cast<T>(static_cast<int>(random() % 5) - 2);
        return t;
    };
    thread_pool threads(3);
    for (const index_t n : {1, 3, 70}) {
        const index_t m = 300, first = m - n;
        const auto q = whole({2, 4, n, 6}, 1), k = whole({2, 2, m, 6}, 2), weights = whole({2, 4, n, 1}, 3);
        const positions where{.first_query = first, .first_key = 0};
        const auto check = [&](const auto& rule) {
            const auto table = select_tokens(q, k, weights, rule, where);
            const auto exact = reference::select_tokens<T>({q, k, k, where}, weights, rule.count, rule.pattern, rule.score);
            REQUIRE(table.shape() == shape{2, 1, n, rule.count});
            CHECK(std::equal(table.data(), table.data() + table.shape().size(), exact.data()));
            const auto shared = select_tokens(q, k, weights, rule, where, threads);
            CHECK(std::equal(table.data(), table.data() + table.shape().size(), shared.data()));
            const auto first_row = select_tokens(q.slice({.tokens = {n - 1, 1}}), k, weights.slice({.tokens = {n - 1, 1}}), rule,
                                                 positions{.first_query = m - 1, .first_key = 0});
            CHECK(std::equal(first_row.data(), first_row.data() + rule.count, &table.view()(0, 0, n - 1, 0)));
        };
        check(token_selection{.count = 20});
        check(token_selection{.count = 400}); // more than there are
        check(token_selection{.count = 7, .pattern = sliding_window(50)});
        check(token_selection{.count = 33, .pattern = dense{}, .score = identity_features{}});
    }
    // What it is for; and NaN, which is chosen last.
    auto q = random_tensor<T>({1, 4, 40, 8}, 1), k = random_tensor<T>({1, 1, 40, 8}, 2);
    const auto weights = random_tensor<T>({1, 4, 40, 1}, 3);
    k(0, 0, 5, 0) = std::numeric_limits<T>::quiet_NaN();
    const auto table = select_tokens(q, k, weights, {.count = 30});
    for (index_t i = 31; i < 40; ++i) CHECK(std::count(&table.view()(0, 0, i, 0), &table.view()(0, 0, i, 0) + 30, index_t{5}) == 0);
    CHECK(error_of([&] { (void)attend(softmax_attention{.pattern = causal{} & selected(table, 1, 1)}, q, q, q); }) == nothing_thrown);
    CHECK(error_of([&] { (void)select_tokens(q, k, q); }) ==
          "select_tokens: weights have shape (1, 4, 40, 8), but for q of shape (1, 4, 40, 8) (1, 4, 40, 1) is needed");
    CHECK(error_of([&] { (void)select_tokens(q, k, weights, {.count = 0}); }) == "select_tokens: rule.count is 0, but must be at least 1");
    CHECK(error_of([&] { (void)select_tokens(q, random_tensor<T>({1, 3, 40, 8}, 2), weights); }) ==
          "select_tokens: k has shape (1, 3, 40, 8), but q has (1, 4, 40, 8): the heads of k and v must divide the heads of q");
    CHECK(select_tokens(tensor<T>({1, 4, 0, 8}), tensor<T>({1, 1, 0, 8}), tensor<T>({1, 4, 0, 1})).shape() == shape{1, 1, 0, 2048});
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
