// The sparse patterns with names: each is what its docstring says, and refuses what it says.
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/sparse_attention.hpp>
#include <attn/attention/softmax_attention.hpp>

#include <string>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr index_t n = 61, heads = 5;

/// The first pair of a pattern for which it says other than visible(head, i, j); "none" if there is none.
std::string difference(const auto& pattern, auto&& visible) {
    for (index_t h = 0; h < heads; ++h) {
        const auto own = at(pattern, 0, h);
        for (index_t i = 0; i < n; ++i)
            for (index_t j = 0; j < n; ++j)
                if (own.visible(i, j) != visible(h, i, j))
                    return "head " + std::to_string(h) + ", query " + std::to_string(i) + ", key " + std::to_string(j);
    }
    return "none";
}

std::string refusal(const auto& pattern) {
    const pattern_context context{
        .operation = "softmax_attention", .batch = 1, .heads = heads, .first_query = 0, .end_query = n, .first_key = 0, .end_key = n};
    return error_of([&] { check(pattern, context); });
}

} // namespace

TEST_CASE("sparse attention: the names mean their definitions", "[attention]") {
    CHECK(difference(sliding_window(7), [](index_t, index_t i, index_t j) { return i - 7 < j && j <= i; }) == "none");
    CHECK(difference(sliding_window(1), [](index_t, index_t i, index_t j) { return i == j; }) == "none");
    CHECK(difference(sparse_transformer_strided(8), [](index_t, index_t i, index_t j) { return j <= i && (i - j < 8 || (i - j) % 8 == 0); }) ==
          "none");
    CHECK(difference(sparse_transformer_strided_heads(6, 2),
                     [](index_t h, index_t i, index_t j) { return j <= i && (h < 2 ? i - j < 6 : (i - j) % 6 == 0); }) == "none");
    CHECK(difference(sparse_transformer_fixed(8, 3), [](index_t, index_t i, index_t j) { return j <= i && (i / 8 == j / 8 || j % 8 >= 5); }) ==
          "none");
    CHECK(difference(sparse_transformer_fixed_heads{12, 2, 3}, [](index_t h, index_t i, index_t j) {
              const auto end = 12 - h % 3 * 2;
              return j <= i && (i / 12 == j / 12 || (j % 12 < end && j % 12 >= end - 2));
          }) == "none");
    CHECK(difference(sparse_transformer_symmetric(4, 9),
                     [](index_t, index_t i, index_t j) { return std::abs(i - j) <= 4 || (i - j) % 9 == 0; }) == "none");
    CHECK(difference(longformer(5, 3), [](index_t, index_t i, index_t j) { return std::abs(i - j) <= 5 || i < 3 || j < 3; }) == "none");
}

TEST_CASE("sparse attention: what the names cost", "[attention]") {
    const index_t m = 4096, s = 64;
    const input_shapes shapes{{1, 1, m, 8}, {1, 1, m, 8}, {1, 1, m, 8}};
    const auto pairs = [&](const auto& pattern) { return visited_pairs(softmax_attention{.pattern = pattern}, shapes).visible; };
    CHECK(pairs(sliding_window(s)) == s * m - s * (s - 1) / 2);
    // A window of 64, and every 64th key before it.
    CHECK(pairs(sparse_transformer_strided(s)) == s * m - s * (s - 1) / 2 + s * (m / s) * (m / s - 1) / 2);
    CHECK(pairs(sparse_transformer_fixed(s, 1)) == (m / s) * s * (s + 1) / 2 + (m / s) * (m / s - 1) / 2 * s);
}

TEST_CASE("sparse attention: wrong parameters are refused", "[attention]") {
    CHECK(refusal(sliding_window(1)) == nothing_thrown);
    CHECK(error_of([] { sliding_window(0); }) == "sliding_window: context is 0, but 1 at least is needed");
    CHECK(error_of([] { sparse_transformer_strided(0); }) == "sparse_transformer_strided: stride is 0, but 1 at least is needed");
    CHECK(error_of([] { sparse_transformer_strided(-5); }) == "sparse_transformer_strided: stride is -5, but 1 at least is needed");
    CHECK(error_of([] { sparse_transformer_strided_heads(0, 2); }) == "sparse_transformer_strided_heads: stride is 0, but 1 at least is needed");
    CHECK_THAT(refusal(sparse_transformer_strided_heads(4, -1)), Contains("on_heads{0, -1} is no range of heads"));
    CHECK_THAT(refusal(sparse_transformer_fixed(0, 1)), Contains("needs a block of at least 1"));
    CHECK_THAT(refusal(sparse_transformer_fixed(4, 5)), Contains("outside the block"));
    CHECK_THAT(refusal(sparse_transformer_symmetric(-1, 4)), Contains("needs a window of at least 0"));
    CHECK_THAT(refusal(sparse_transformer_symmetric(3, 0)), Contains("needs a stride of at least 1"));
    CHECK_THAT(refusal(longformer(3, -1)), Contains("needs a count of at least 0"));
    CHECK_THAT(refusal(sparse_transformer_fixed_heads{8, 2, 0}), Contains("needs a sub_blocks of at least 1"));
    CHECK_THAT(refusal(sparse_transformer_fixed_heads{8, 2, 5}), Contains("outside the block"));
    CHECK(refusal(sparse_transformer_fixed_heads{8, 2, 4}) == nothing_thrown);
}

} // namespace attn::testing
