// Wrong parameters, and tables made for something else, are refused by name before anything is computed.
#include "catch.hpp"
#include "errors.hpp"

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
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/pattern/tiles.hpp>

namespace {

using attn::index_t;

std::string refusal(const auto& pattern, const attn::pattern_context& context) {
    return attn::testing::error_of([&] { attn::check(pattern, context); });
}

const attn::pattern_context context{.operation = "softmax_attention", .batch = 2, .heads = 4, .first_query = 10, .end_query = 60,
                                    .first_key = 0, .end_key = 60};

const std::string& accepted = attn::testing::nothing_thrown;

TEST_CASE("wrong parameters of patterns are refused", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    CHECK(refusal(strided{0}, context) == "softmax_attention: pattern strided{0} needs a stride of at least 1");
    CHECK(refusal(strided{-3}, context) == "softmax_attention: pattern strided{-3} needs a stride of at least 1");
    CHECK(refusal(local{-1}, context) == "softmax_attention: pattern local{-1, -1} needs a window of at least 0");
    CHECK(refusal(local{4, -1}, context) == "softmax_attention: pattern local{4, -1} needs a window of at least 0");
    CHECK(refusal(block_diagonal{0}, context) == "softmax_attention: pattern block_diagonal{0} needs a block of at least 1");
    CHECK(refusal(fixed{0, 1}, context) == "softmax_attention: pattern fixed{0, 1, 0} needs a block of at least 1");
    CHECK(refusal(fixed{8, 0}, context) == "softmax_attention: pattern fixed{8, 0, 0} needs a width of at least 1");
    CHECK(refusal(fixed{8, 3, 2}, context) == "softmax_attention: pattern fixed{8, 3, 2} has its summary columns outside the block");
    CHECK(refusal(fixed{8, 4, 1}, context) == accepted);
    CHECK(refusal(fixed{8, 4, -1}, context) == "softmax_attention: pattern fixed{8, 4, -1} needs a sub-block of at least 0");
    CHECK(refusal(global{-1}, context) == "softmax_attention: pattern global{-1} needs a count of at least 0");
    CHECK(refusal(prefix{-1}, context) == "softmax_attention: pattern prefix{-1} needs a length of at least 0");
    CHECK(refusal(dilated_window{2, 0}, context) == "softmax_attention: pattern dilated_window{2, 0} needs a dilation of at least 1");
    CHECK(refusal(dilated_window{-2, 1}, context) == "softmax_attention: pattern dilated_window{-2, 1} needs a window of at least 0");
    CHECK(refusal(dilated_window{attn::index_t{1} << 62, 8}, context).find("reaches further") != std::string::npos);
    CHECK(refusal(on_heads{2, 1}, context) == "softmax_attention: pattern on_heads{2, 1} is no range of heads");
}

TEST_CASE("wrong parameters are found inside combinations", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    const std::string refused = "softmax_attention: pattern strided{0} needs a stride of at least 1";
    CHECK(refusal(causal{} & (local{3} | strided{0}), context) == refused);
    CHECK(refusal(!(strided{0} & causal{}), context) == refused);
    CHECK(refusal((on_heads{0, 1} & strided{0}) | causal{}, context) == refused);
    CHECK(refusal(predicate{[](auto i, auto j) { return i < j; }} | causal{} | dense{}, context) == accepted);
}

TEST_CASE("lengths of another batch are refused", "[pattern]") {
    const std::vector<index_t> two{3, 60}, three{1, 2, 3}, negative{1, -2};
    CHECK(refusal(attn::pattern::lengths{two}, context) == accepted);
    CHECK(refusal(attn::pattern::lengths{three}, context) == "softmax_attention: pattern lengths{3 values} is for another batch than 2");
    CHECK(refusal(attn::pattern::lengths{negative}, context) == "softmax_attention: pattern lengths{2 values} holds the length -2");
}

TEST_CASE("tables made for something else are refused", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    const bool values[4 * 60 * 60]{};
    const auto mask = [&](const shape& s, attn::index_t row = 0, attn::index_t column = 0) { return tiles(head_major(values, s), row, column); };
    CHECK(refusal(mask({1, 1, 60, 60}), context) == accepted);
    CHECK(refusal(mask({1, 4, 50, 60}, 10), context) == accepted);
    CHECK(refusal(mask({2, 1, 1, 60}), context) == accepted);
    CHECK(refusal(mask({1, 1, 59, 60}), context) ==
          "softmax_attention: pattern tiles{(1, 1, 59, 60)} is for queries 0 .. 58, not 10 .. 59");
    CHECK(refusal(mask({1, 1, 50, 60}, 11), context).find("is for queries 11 .. 60, not 10 .. 59") != std::string::npos);
    CHECK(refusal(mask({1, 1, 60, 59}), context).find("is for keys 0 .. 58, not 0 .. 59") != std::string::npos);
    CHECK(refusal(mask({1, 1, 60, 60}, 0, 1), context).find("is for keys 1 .. 60, not 0 .. 59") != std::string::npos);
    CHECK(refusal(mask({3, 1, 1, 60}), context).find("is for another batch than 2") != std::string::npos);
    CHECK(refusal(mask({1, 3, 1, 60}), context).find("is for another number of heads than 4") != std::string::npos);
    auto nothing = context;
    nothing.end_query = nothing.first_query;
    CHECK(refusal(mask({1, 1, 0, 60}), nothing) == accepted);

    const auto blocks = head_major(values, {1, 1, 4, 4});
    CHECK(refusal(block_sparse{blocks, 15}, context) == accepted);
    CHECK(refusal(block_sparse{blocks, 15, 14}, context) ==
          "softmax_attention: pattern block_sparse{(1, 1, 4, 4), 15, 14} is for keys 0 .. 55, not 0 .. 59");
    CHECK(refusal(block_sparse{blocks, 0}, context) == "softmax_attention: pattern block_sparse{(1, 1, 4, 4), 0, 0} needs a query block of at least 1");
    CHECK(refusal(block_sparse{blocks, 15, -1}, context).find("needs a key block of at least 1") != std::string::npos);

    const std::vector<std::int32_t> ids(120);
    CHECK(refusal(segments(ids, 2), context) == accepted);
    CHECK(refusal(segments(ids, 1), context) == accepted);
    CHECK(refusal(segments(ids, 4), context).find("is for another batch than 2") != std::string::npos);
    CHECK(refusal(segments(ids, 2, 11), context).find("is for queries 11 .. 70, not 10 .. 59") != std::string::npos);
    CHECK_THROWS_AS(segments(ids, 7), shape_error);
    CHECK_THROWS_AS(segments(ids, 0), shape_error);
}

TEST_CASE("tables at the farthest positions, and beyond", "[pattern]") {
    using namespace attn;
    using namespace attn::pattern;
    constexpr auto far = farthest_position;
    constexpr auto min_index = std::numeric_limits<attn::index_t>::min(), max_index = std::numeric_limits<attn::index_t>::max();
    const bool values[60 * 60]{};
    const auto view = head_major(values, {1, 1, 60, 60});
    const std::vector<std::int32_t> ids(120);
    auto end = context, begin = context;
    end.first_query = far - 49, end.end_query = far + 1, end.first_key = far - 59, end.end_key = far + 1;
    begin.first_query = -far, begin.end_query = -far + 50, begin.first_key = -far, begin.end_key = -far + 60;
    CHECK(refusal(tiles(view, far - 59, far - 59), end) == accepted);
    CHECK(refusal(tiles(view, -far, -far), begin) == accepted);
    CHECK(refusal(segments(ids, 2, far - 59), end) == accepted);
    CHECK(refusal(segments(ids, 2, -far), begin) == accepted);
    CHECK(refusal(tiles(view, far, far), end).find("is for queries " + std::to_string(far)) != std::string::npos);
    for (const auto first : {min_index, -far - 1, far + 1, max_index}) {
        CHECK_THROWS_AS(tiles(view, first), argument_error);
        CHECK_THROWS_AS(tiles(view, 0, first), argument_error);
        CHECK_THROWS_AS(tiles([](attn::index_t, attn::index_t) { return true; }, 2, 2, first, 0), argument_error);
        CHECK_THROWS_AS(segments(ids, 2, first), argument_error);
        CHECK_THROWS_AS(segments(ids, ids, 2, 0, first), argument_error);
    }
    for (const auto huge : {max_index, max_index / 2, max_index / 4 + 2, attn::index_t{1} << 61}) {
        CHECK(refusal(block_sparse{head_major(values, {1, 1, 4, 4}), huge}, context) == accepted);
        CHECK(block_sparse{head_major(values, {1, 1, 4, 4}), huge}.at(0, 0).visible(59, 59) == false);
    }
    end.first_query = 0, end.first_key = 0;
    CHECK(refusal(block_sparse{head_major(values, {1, 1, 4, 4}), max_index}, end) == accepted);
}

} // namespace
