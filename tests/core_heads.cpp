#include <attn/core/heads.hpp>

#include "catch.hpp"
#include "errors.hpp"

#include <numeric>

namespace attn::testing {
namespace {

template <class V>
concept CanBeSplit = requires(V&& v) { split_heads(std::forward<V>(v), 1); };

} // namespace

TEST_CASE("split_heads: a head's channels are a part of a row's, whatever the strides; join_heads undoes it", "[core][portable]") {
    tensor<float> rows({.batch = 2, .tokens = 5, .channels = 12});
    std::iota(rows.data(), rows.data() + rows.shape().size(), 0.0f);
    const auto heads = split_heads(rows, 3);
    STATIC_REQUIRE(std::same_as<decltype(heads), const tensor_view<float>>);
    REQUIRE(heads.shape() == shape{2, 3, 5, 4});
    for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t i = 0; i < 5; ++i)
                for (index_t c = 0; c < 4; ++c) CHECK(&heads(b, h, i, c) == &rows(b, 0, i, 4 * h + c));
    const auto joined = join_heads(heads);
    CHECK(joined.shape() == rows.shape());
    CHECK(&joined(1, 0, 4, 11) == &rows(1, 0, 4, 11));

    const auto& constant = rows;
    STATIC_REQUIRE(std::same_as<decltype(split_heads(constant, 1)), tensor_view<const float>>);
    STATIC_REQUIRE(CanBeSplit<tensor<float>&> && CanBeSplit<tensor_view<float>>);
    STATIC_REQUIRE_FALSE(CanBeSplit<tensor<float>>); // it would be gone
    const tensor_view<const float> columns(rows.data(), {1, 1, 12, 5}, {60, 0, 1, 12});
    CHECK(split_heads(columns, 5)(0, 3, 7, 0) == rows(0, 0, 3, 7));
    CHECK(join_heads(split_heads(columns, 5)).strides() == strides{60, 0, 1, 12});
}

TEST_CASE("split_heads, join_heads: what they refuse", "[core]") {
    const tensor<float> rows({.batch = 2, .tokens = 5, .channels = 12}), heads({2, 3, 5, 4});
    CHECK(error_of<argument_error>([&] { (void)split_heads(rows, 0); }) == "split_heads: heads are 0: one at least is needed");
    CHECK(error_of<shape_error>([&] { (void)split_heads(rows, 5); }) ==
          "split_heads: rows have shape (2, 1, 5, 12), but (batch, 1, tokens, a multiple of 5) is needed");
    check_says(error_of<shape_error>([&] { (void)split_heads(heads, 2); }), {"split_heads: rows have shape (2, 3, 5, 4)"});
    CHECK(error_of<shape_error>([&] { (void)join_heads(heads); }) ==
          "join_heads: heads of shape (2, 3, 5, 4) have a head stride of 20: they do not lie side by side");
    const tensor_view<const float> nowhere(nullptr, {2, 1, 5, 12}, {60, 0, 12, 1});
    check_says(error_of<shape_error>([&] { (void)split_heads(nowhere, 2); }), {"split_heads: rows", "null pointer"});
}

} // namespace attn::testing
