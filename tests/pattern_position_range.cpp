#include "catch.hpp"
#include "pattern_checks.hpp"

#include <attn/pattern/position_range.hpp>

namespace {

using attn::index_t;
using attn::position_range;
using attn::visibility;

std::vector<index_t> elements(const position_range& r) {
    std::vector<index_t> all;
    for (index_t x = r.first; x <= r.last; x += std::max<index_t>(r.step, 1)) all.push_back(x);
    return all;
}

bool contains(const position_range& r, index_t x) { return r.first <= x && x <= r.last && (r.step == 0 || (x - r.first) % r.step == 0); }

std::vector<position_range> small_ranges() {
    std::vector<position_range> all;
    for (index_t first = -9; first <= 9; ++first)
        for (index_t step = 1; step <= 5; ++step)
            for (index_t count = 1; count <= 5; ++count) all.emplace_back(first, first + (count - 1) * step, step);
    return all;
}

// The number of values of f(x) that f(range) does not hold.
index_t lost(const auto& f) {
    index_t count = 0;
    for (const auto& r : small_ranges()) {
        const position_range image = f(r);
        for (const auto x : elements(r)) count += !contains(image, f(x));
    }
    return count;
}

index_t wrong(const auto& compare) {
    index_t count = 0;
    for (const auto& a : small_ranges())
        for (const position_range b : {position_range(-4, 2, 1), position_range(0, 6, 3), position_range(3), position_range(-7, 8, 5)}) {
            index_t yes = 0, no = 0;
            for (const auto x : elements(a))
                for (const auto y : elements(b)) ++(compare(x, y) ? yes : no);
            const visibility seen = compare(a, b);
            count += (seen.is_all() && no > 0) || (seen.is_none() && yes > 0);
        }
    return count;
}

TEST_CASE("position_range: arithmetic encloses integer arithmetic", "[pattern][portable]") {
    for (index_t c = -7; c <= 7; ++c) {
        CAPTURE(c);
        CHECK(lost([&](auto x) { return x + c; }) == 0);
        CHECK(lost([&](auto x) { return c - x; }) == 0);
        CHECK(lost([&](auto x) { return x * c; }) == 0);
        if (c == 0) continue;
        CHECK(lost([&](auto x) { return x / c; }) == 0);
        CHECK(lost([&](auto x) { return x % c; }) == 0);
        if (c < 0) continue;
        CHECK(lost([&](auto x) { return attn::floor_div(x, c); }) == 0);
        CHECK(lost([&](auto x) { return attn::floor_mod(x, c); }) == 0);
        CHECK(lost([&](auto x) { return attn::abs(x) % c; }) == 0);
    }
    CHECK(lost([](auto x) { return -x; }) == 0);
    CHECK(lost([](auto x) { return attn::abs(x); }) == 0);
    CHECK(lost([](auto x) { return x * x; }) == 0);
}

TEST_CASE("sums and products of two ranges enclose all pairs", "[pattern][portable]") {
    index_t outside = 0;
    for (const auto& a : small_ranges())
        for (const position_range b : {position_range(-4, 2, 3), position_range(0, 6, 2), position_range(-3), position_range(5, 13, 4)})
            for (const auto x : elements(a))
                for (const auto y : elements(b)) outside += !contains(a + b, x + y) + !contains(a - b, x - y) + !contains(a * b, x * y);
    CHECK(outside == 0);
    const position_range sum = position_range(1, 7, 3) + position_range(2, 4, 1), difference = position_range(1, 7, 3) - position_range(2, 8, 6), product = position_range(-2, 4, 2) * position_range(3, 5, 1);
    CHECK((sum.first == 3 && sum.last == 11 && sum.step == 1));
    CHECK((difference.first == -7 && difference.last == 5 && difference.step == 3));
    CHECK((product.first == -10 && product.last == 20 && product.step == 2));
}

TEST_CASE("position_range: comparisons never claim wrongly", "[pattern][portable]") {
    CHECK(wrong([](auto a, auto b) { return a < b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return a <= b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return a > b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return a >= b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return a == b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return a != b; }) == 0);
    CHECK(wrong([](auto a, auto b) { return (a < b) == (b < 3); }) == 0);
    CHECK(wrong([](auto a, auto b) { return (a % 2 == 0) != (b < 3); }) == 0);
    CHECK(wrong([](auto a, auto b) { return true && (a * b < 5 || false); }) == 0);
}

TEST_CASE("ranges decide what strides and blocks need", "[pattern]") {
    const position_range i(3, 3 + 15 * 7, 7);
    CHECK(((i - position_range(3, 66, 7)) % 7 == 0).is_all());
    CHECK(((i - position_range(4, 67, 7)) % 7 == 0).is_none());
    CHECK((i % 7 == 3).is_all());
    CHECK((i == position_range(4, 67, 7)).is_none());
    CHECK((floor_div(position_range(-16, -1, 1), 16) == floor_div(position_range(-12, -3, 1), 16)).is_all());
    CHECK((floor_div(position_range(-16, -1, 1), 16) == floor_div(position_range(0, 3, 1), 16)).is_none());
    CHECK((5u <= position_range(5, 9, 1)).is_all());
    CHECK((position_range(5, 9, 1) < short{5}).is_none());
    CHECK(attn::floor_mod(-1, 8) == 7);
    CHECK(attn::floor_div(-9, 8) == -2);
    CHECK(attn::floor_div(-(index_t{1} << 40) - 1, 3) == -366503875926);
}

} // namespace
