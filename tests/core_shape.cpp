#include "catch.hpp"

#include <attn/core/shape.hpp>

namespace attn::testing {

TEST_CASE("shape: a matrix of one head names two extents", "[core]") {
    constexpr shape matrix{.tokens = 197, .channels = 64};
    STATIC_REQUIRE(matrix == shape{1, 1, 197, 64});
    STATIC_REQUIRE(matrix.size() == 197 * 64);
    STATIC_REQUIRE(shape{}.size() == 0);
    STATIC_REQUIRE(shape{2, 3, 0, 5}.size() == 0);
}

TEST_CASE("shape: sizes are 64 bits wide", "[core]") { STATIC_REQUIRE(shape{1 << 10, 1 << 10, 1 << 20, 1 << 10}.size() == index_t{1} << 50); }

TEST_CASE("shape: written as batch, heads, tokens, channels", "[core]") {
    CHECK(to_string(shape{2, 8, 197, 64}) == "(2, 8, 197, 64)");
    CHECK(to_string(shape{}) == "(1, 1, 0, 0)");
}

TEST_CASE("errors: name operator, argument and problem, and have one base, an invalid_argument", "[core]") {
    const shape_error error("softmax_attention", "keys", "(1, 2, 3, 4) does not match queries (1, 2, 3, 5)");
    CHECK(std::string_view(error.what()) == "softmax_attention: keys (1, 2, 3, 4) does not match queries (1, 2, 3, 5)");
    CHECK_THROWS_AS(throw error, attention_error);
    CHECK_THROWS_AS(throw argument_error("softmax_attention", "scale", "is not finite"), attention_error);
    CHECK_THROWS_AS(throw error, std::invalid_argument);
}

} // namespace attn::testing
