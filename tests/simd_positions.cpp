// Lanes of positions against 64-bit integers.
#include "catch.hpp"

#include <attn/pattern/pattern.hpp>
#include <attn/simd/positions.hpp>

#include <cmath>
#include <random>

namespace attn::testing {

namespace {

/// As many lanes as a register, and as many as a mask has bits.
using floats = simd::affine_lanes<float>;
using doubles = simd::affine_lanes<double>;
using wide = simd::affine_lanes<float, 64>;

/// bits[l] is f(position of lane l), for all lanes there are.
template <class L, class F>
bool agrees(const simd::lane_bits& bits, const L& a, F f) {
    for (index_t l = 0; l < L::size; ++l)
        if (((bits.value >> l & 1) != 0) != f(a.first + l * a.step)) return false;
    return true;
}
template <class L, class F>
bool agrees(const typename L::integers& ours, const L& a, F f) {
    for (index_t l = 0; l < L::size; ++l)
        if (ours.value[static_cast<std::size_t>(l)] != f(a.first + l * a.step)) return false;
    return true;
}
/// Both are given a function of lanes and of one number.
template <class L, class F>
bool agrees(F f, const L& a) {
    return agrees<L>(f(a), a, f) && agrees<L>(f(typename L::integers(a)), a, f);
}
template <class L, class F>
bool agrees_affine(F f, const L& a) {
    return agrees<L>(typename L::integers(f(a)), a, f);
}

template <class L>
void check_comparisons(const L& a, index_t b) {
    INFO("first " << a.first << ", step " << a.step << ", limit " << b);
    const bool same = agrees<L>([b](auto x) { return x < b; }, a) && agrees<L>([b](auto x) { return x <= b; }, a) &&
                      agrees<L>([b](auto x) { return x > b; }, a) && agrees<L>([b](auto x) { return x >= b; }, a) &&
                      agrees<L>([b](auto x) { return x == b; }, a) && agrees<L>([b](auto x) { return x != b; }, a);
    const bool reversed = agrees<L>([b](auto x) { return b < x; }, a) && agrees<L>([b](auto x) { return b <= x; }, a) &&
                          agrees<L>([b](auto x) { return b > x; }, a) && agrees<L>([b](auto x) { return b >= x; }, a) &&
                          agrees<L>([b](auto x) { return b == x; }, a) && agrees<L>([b](auto x) { return b != x; }, a);
    if (!same || !reversed) FAIL_CHECK("a comparison is wrong");
}

template <class L>
void check_arithmetic(const L& a, index_t b) {
    INFO("first " << a.first << ", step " << a.step << ", number " << b);
    const bool sums = agrees_affine<L>([b](auto x) { return x + b; }, a) && agrees_affine<L>([b](auto x) { return b + x; }, a) &&
                      agrees_affine<L>([b](auto x) { return x - b; }, a) && agrees_affine<L>([b](auto x) { return b - x; }, a) &&
                      agrees_affine<L>([](auto x) { return -x; }, a);
    if (!sums) FAIL_CHECK("a sum is wrong");
}

template <class L>
void check_products(const L& a, index_t b) {
    INFO("first " << a.first << ", step " << a.step << ", number " << b);
    bool right = agrees_affine<L>([b](auto x) { return x * b; }, a) && agrees_affine<L>([b](auto x) { return b * x; }, a) &&
                 agrees<L>(
                     [](auto x) {
                         using std::abs;
                         return abs(x);
                     },
                     a);
    if (b != 0) right = right && agrees<L>([b](auto x) { return x / b; }, a) && agrees<L>([b](auto x) { return x % b; }, a);
    if (b > 0) {
        right = right && agrees<L>(floor_div(a, b), a, [b](index_t x) {
                    return static_cast<index_t>(std::floor(static_cast<double>(x) / static_cast<double>(b)));
                });
        right = right && agrees<L>(floor_mod(a, b), a, [b](index_t x) { return (x % b + b) % b; });
    }
    if (!right) FAIL_CHECK("a product is wrong");
}

} // namespace

TEMPLATE_TEST_CASE("affine_lanes and integer_lanes: small numbers, exhaustively", "[simd][portable]", floats, doubles, wide) {
    for (index_t first = -20; first <= 20; ++first)
        for (index_t step = -4; step <= 4; ++step)
            for (index_t b = -25; b <= 25; ++b) {
                const TestType a{first, step};
                check_comparisons<TestType>(a, b);
                check_arithmetic<TestType>(a, b);
                check_products<TestType>(a, b);
            }
}

TEMPLATE_TEST_CASE("affine_lanes and integer_lanes: large numbers", "[simd][portable]", floats, doubles, wide) {
    std::mt19937_64 random(4);
    constexpr index_t far = index_t{1} << 40;
    for (int round = 0; round < 20'000; ++round) {
        const auto near = [&](index_t centre, index_t reach) {
            return centre + static_cast<index_t>(random() % static_cast<std::uint64_t>(2 * reach + 1)) - reach;
        };
        const index_t steps[] = {1, 1, -1, 2, 7, -7, 64, 1000, far / 1000};
        const TestType a{near(round % 2 == 0 ? far : -far, 50), steps[random() % std::size(steps)]};
        const auto b = near(a.first + static_cast<index_t>(random() % 16) * a.step, 2);
        check_comparisons<TestType>(a, b);
        check_arithmetic<TestType>(a, b);
    }
}

TEMPLATE_TEST_CASE("affine_lanes: divisors that a product stands for, and those behind", "[simd][portable]", floats, doubles, wide) {
    index_t wrong = 0;
    for (index_t divisor = 1; divisor <= (1 << 15) / TestType::size + 3; ++divisor)
        for (const index_t rest : {index_t{0}, divisor / 2, divisor - 1})
            for (const index_t step : {index_t{0}, index_t{1}, divisor - 1, 2 * divisor + 1}) {
                const TestType a{(index_t{1} << 40) / divisor * divisor + rest, step};
                wrong += !agrees<TestType>(a / divisor, a, [=](index_t x) { return x / divisor; });
                wrong += !agrees<TestType>(a % divisor, a, [=](index_t x) { return x % divisor; });
            }
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("affine_lanes: limits at the ends of their types", "[simd][portable]", floats, doubles, wide) {
    constexpr auto max_index = std::numeric_limits<index_t>::max(), min_index = std::numeric_limits<index_t>::min();
    for (const index_t first : {index_t{0}, index_t{1} << 40, -(index_t{1} << 40)})
        for (const index_t step : {1, -1, 3, 0})
            for (const index_t limit : {max_index, max_index - 1, min_index, min_index + 1}) check_comparisons<TestType>({first, step}, limit);
    const TestType a{5, 1};
    const auto max_unsigned = std::numeric_limits<std::uint64_t>::max();
    CHECK(agrees<TestType>(a < max_unsigned, a, [](index_t) { return true; }));
    CHECK(agrees<TestType>(a > max_unsigned, a, [](index_t) { return false; }));
    CHECK(agrees<TestType>(a == max_unsigned, a, [](index_t) { return false; }));
    CHECK(agrees<TestType>(a <= 7u, a, [](index_t x) { return x <= 7; }));
    CHECK(agrees<TestType>(std::int8_t{7} > a, a, [](index_t x) { return x < 7; }));
}

TEMPLATE_TEST_CASE("positions as numbers to compute scores with", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType>;
    using affine = simd::affine_lanes<TestType>;
    for (const affine a : {affine{0, 1}, {-1000, 7}, {12, -3}, {100'000, 0}}) {
        for (const lanes& x :
             {static_cast<lanes>(a), static_cast<lanes>(typename affine::integers(a)), 1.0 * a, 1.0 * typename affine::integers(a)}) {
            TestType numbers[lanes::size];
            x.store(numbers);
            for (index_t l = 0; l < lanes::size; ++l) CHECK(numbers[l] == static_cast<TestType>(a.first + l * a.step));
        }
    }
}

TEMPLATE_TEST_CASE("query_lanes: what patterns with a memory rely on", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using queries = simd::query_lanes<TestType>;
    STATIC_REQUIRE(QueryLanes<queries>);
    queries q;
    CHECK(q.count == queries::size);
    CHECK(queries::mask_from_bits(0b101).value == 0b101);
    q.first = 40;
    q.step = 3;
    CHECK(agrees<simd::affine_lanes<TestType>>(q <= 46, q, [](index_t x) { return x <= 46; }));
}

} // namespace attn::testing
