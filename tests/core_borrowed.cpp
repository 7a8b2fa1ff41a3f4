// What can be borrowed, and what is refused because nobody would keep it.
#include "catch.hpp"

#include <attn/core/borrowed.hpp>

#include <array>
#include <cstddef>
#include <vector>

namespace attn::testing {

namespace {

using numbers = borrowed<const long>;

/// Whether the list {0, 1} makes one: as a null pointer and a count it would.
template <class B>
concept MadeOfZeroAndOne = requires { B{0, 1}; };

} // namespace

TEST_CASE("borrowed: refers to what somebody keeps, wherever it is kept", "[core]") {
    std::vector<long> changing{1, 2, 3};
    const std::vector<long> constant{4, 5};
    const std::array<long, 2> fixed{6, 7};
    const long plain[]{8, 9, 10};
    const auto is = [](const numbers& b, const long* data, std::size_t count) { return b.data() == data && b.size() == count; };
    CHECK(is(changing, changing.data(), 3));
    CHECK(is(constant, constant.data(), 2));
    CHECK(is(fixed, fixed.data(), 2));
    CHECK(is(plain, plain, 3));
    CHECK(is(std::span(changing).last(2), changing.data() + 1, 2));
    CHECK(is({plain + 1, 2}, plain + 1, 2));
    CHECK(is(borrowed<long>(changing), changing.data(), 3)); // a temporary, but not the one that keeps the numbers
    CHECK(is({}, nullptr, 0));
}

TEST_CASE("borrowed: what would be gone before it is read is refused by the compiler", "[core]") {
    STATIC_REQUIRE_FALSE(std::convertible_to<std::vector<long>, numbers>);
    STATIC_REQUIRE_FALSE(std::convertible_to<const std::vector<long>, numbers>);
    STATIC_REQUIRE_FALSE(std::convertible_to<std::array<long, 2>, numbers>);
    STATIC_REQUIRE_FALSE(std::constructible_from<numbers, std::vector<long>>);
    STATIC_REQUIRE_FALSE(MadeOfZeroAndOne<numbers>);
    STATIC_REQUIRE_FALSE(std::convertible_to<const std::vector<long>&, borrowed<long>>); // what is constant stays so
    STATIC_REQUIRE_FALSE(std::convertible_to<std::vector<int>&, numbers>);
}

} // namespace attn::testing
