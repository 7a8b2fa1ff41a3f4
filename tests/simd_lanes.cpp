// Registers against numbers, lane by lane.
#include "catch.hpp"

#include <attn/simd/elementary.hpp>
#include <attn/simd/transpose.hpp>
#include <attn/simd/unroll.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace attn::testing {

namespace {

template <Scalar T>
using lanes = simd::lanes<T>;

template <Scalar T>
std::array<T, lanes<T>::size> numbers_of(const lanes<T>& x) {
    std::array<T, lanes<T>::size> numbers;
    x.store(numbers.data());
    return numbers;
}

template <Scalar T>
lanes<T> random_lanes(std::mt19937& random, T limit = 100) {
    std::uniform_real_distribution<T> number(-limit, limit);
    std::array<T, lanes<T>::size> numbers;
    for (auto& x : numbers) x = number(random);
    return lanes<T>::load(numbers.data());
}

/// f(lanes) is f(number) in every lane, to a few units in the last place.
template <Scalar T, class F, class... X>
void check_lanes(double ulps, F f, const X&... x) {
    const auto ours = numbers_of<T>(f(x...));
    for (std::size_t l = 0; l < ours.size(); ++l) {
        const auto expected = static_cast<double>(f(numbers_of<T>(x)[l]...));
        const auto error = std::abs(static_cast<double>(ours[l]) - expected);
        if (!(error <= ulps * static_cast<double>(std::numeric_limits<T>::epsilon()) * std::abs(expected)))
            FAIL_CHECK("lane " << l << " is " << ours[l] << ", not " << expected);
    }
}

template <Scalar T, class F>
void check_mask(F f, const lanes<T>& a, const lanes<T>& b) {
    const auto x = numbers_of(a), y = numbers_of(b);
    const auto bits = f(a, b).bits().value;
    for (std::size_t l = 0; l < x.size(); ++l) CHECK(((bits >> l & 1) != 0) == f(x[l], y[l]));
}

} // namespace

TEMPLATE_TEST_CASE("lanes: arithmetic", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    std::mt19937 random(1);
    for (int round = 0; round < 50; ++round) {
        const auto a = random_lanes<T>(random), b = random_lanes<T>(random), c = random_lanes<T>(random);
        check_lanes<T>(0, [](auto x, auto y) { return x + y; }, a, b);
        check_lanes<T>(0, [](auto x, auto y) { return x - y; }, a, b);
        check_lanes<T>(0, [](auto x, auto y) { return x * y; }, a, b);
        check_lanes<T>(0, [](auto x, auto y) { return x / y; }, a, b);
        check_lanes<T>(0, [](auto x) { return -x; }, a);
        check_lanes<T>(
            0,
            [](auto x, auto y) {
                x += y;
                x *= y;
                x -= y;
                x /= y;
                return x;
            },
            a, b);
        check_lanes<T>(
            0,
            [](auto x) {
                using std::abs;
                return abs(x);
            },
            a);
        check_lanes<T>(
            0,
            [](auto x) {
                using std::abs, std::sqrt;
                return sqrt(abs(x));
            },
            a);
        check_lanes<T>(
            0,
            [](auto x, auto y) {
                using std::min, std::max;
                return min(x, y) - max(x, y);
            },
            a, b);
        check_lanes<T>(
            2,
            [](auto x) {
                using std::exp;
                return exp(x * T(0.1));
            },
            a);
        check_lanes<T>(
            2,
            [](auto x) {
                using std::abs, std::log;
                return log(abs(x) + T(2));
            },
            a);
        check_lanes<T>(
            4,
            [](auto x) {
                using std::tanh;
                return tanh(x * T(0.05));
            },
            a);
        const auto sums = numbers_of(fma(a, b, c));
        for (std::size_t l = 0; l < sums.size(); ++l) { // rounded once or twice
            const auto product = static_cast<double>(numbers_of(a)[l]) * static_cast<double>(numbers_of(b)[l]);
            CHECK(std::abs(static_cast<double>(sums[l]) - (product + static_cast<double>(numbers_of(c)[l]))) <=
                  static_cast<double>(std::numeric_limits<T>::epsilon()) * (std::abs(product) + 100));
        }
    }
}

TEMPLATE_TEST_CASE("lanes: functions at the ends of their ranges are the standard's", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max(), least = std::numeric_limits<T>::min();
    const auto check = [](const char* name, T x, const auto& f) {
        const auto exact = static_cast<T>(f(x)), ours = numbers_of(static_cast<lanes<T>>(f(lanes<T>(x))))[0];
        INFO(name << " of " << x << ": " << ours << ", not " << exact);
        const auto near = 64 * std::numeric_limits<T>::epsilon() * std::abs(exact) + least; // below the normal numbers, 0 will do
        CHECK((std::isnan(exact) ? std::isnan(ours) : ours == exact || std::abs(ours - exact) <= near));
    };
    for (const T x : {T{0}, -T{0}, T(1e-30), -T(1e-30), T(70), T(-70), T(700), T(-700), T(1e10), T(-1e10), most / 8, -most / 8, most, -most, infinity, -infinity, std::numeric_limits<T>::quiet_NaN()}) {
        check("exp", x, [](auto y) { using std::exp; return exp(y); });
        check("log", x, [](auto y) { using std::log; return log(y); });
        check("sqrt", x, [](auto y) { using std::sqrt; return sqrt(y); });
        check("tanh", x, [](auto y) { using std::tanh; return tanh(y); });
        check("erf", x, [](auto y) { using std::erf; return erf(y); });
        check("pow to 2", x, [](auto y) { using std::pow; return pow(y, decltype(y)(T{2})); });
        check("pow to 3", x, [](auto y) { using std::pow; return pow(y, decltype(y)(T{3})); });
        check("pow to 1/2", x, [](auto y) { using std::pow; return pow(y, decltype(y)(T(0.5))); });
        check("pow to -1", x, [](auto y) { using std::pow; return pow(y, decltype(y)(T{-1})); });
        check("pow to 0", x, [](auto y) { using std::pow; return pow(y, decltype(y)(T{0})); });
    }
}

TEMPLATE_TEST_CASE("lanes: comparisons and select", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    std::mt19937 random(2);
    auto a = random_lanes<T>(random);
    auto numbers = numbers_of(a);
    numbers[0] = 3;
    numbers[1] = std::numeric_limits<T>::quiet_NaN();
    const auto b = lanes<T>::load(numbers.data());
    numbers[0] = 4;
    a = lanes<T>::load(numbers.data());
    for (const auto& [x, y] : {std::pair{a, b}, {b, a}, {a, a}}) {
        check_mask<T>([](auto u, auto v) { return u < v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u > v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u <= v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u >= v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u == v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u != v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u < v && u != v; }, x, y);
        check_mask<T>([](auto u, auto v) { return u < v || u == v; }, x, y);
        check_mask<T>([](auto u, auto v) { return !(u < v); }, x, y);
    }
}

TEMPLATE_TEST_CASE("lanes: every mask from its bits and back", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto all = (std::uint64_t{1} << lanes<T>::size) - 1;
    for (std::uint64_t bits = 0; bits <= all; ++bits) {
        const auto mask = lanes<T>::mask::from_bits({bits});
        if ((mask.bits().value & all) != bits) FAIL_CHECK("bits " << bits << " became " << mask.bits().value);
        const auto chosen = numbers_of<T>(select(simd::lane_bits{bits}, lanes<T>(1), lanes<T>(2)));
        for (std::size_t l = 0; l < chosen.size(); ++l)
            if (chosen[l] != ((bits >> l & 1) != 0 ? T{1} : T{2}))
                FAIL_CHECK("bits " << bits << " select " << chosen[l] << " in lane " << l);
    }
}

TEMPLATE_TEST_CASE("lanes: max_or_second and min_or_second are the second where either is NaN", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
    const auto max = [](T x, T y) { return numbers_of<T>(max_or_second(lanes<T>(x), lanes<T>(y)))[0]; };
    const auto min = [](T x, T y) { return numbers_of<T>(min_or_second(lanes<T>(x), lanes<T>(y)))[0]; };
    CHECK(max(1, 2) == 2);
    CHECK(max(2, 1) == 2);
    CHECK(max(-infinity, -3) == -3);
    CHECK(max(infinity, -3) == infinity);
    CHECK(min(1, 2) == 1);
    CHECK(min(2, 1) == 1);
    CHECK(min(-infinity, -3) == -infinity);
    CHECK(min(infinity, -3) == -3);
    for (T (*extreme)(T, T) : {+max, +min}) {
        CHECK(extreme(nan, 5) == 5);
        CHECK(std::isnan(extreme(5, nan)));
        CHECK(std::isnan(extreme(nan, nan)));
    }
}

TEST_CASE("lane_bits: truth tables", "[simd][portable]") {
    using simd::lane_bits;
    const lane_bits a{0b0011}, b{0b0101};
    CHECK((a && b).value == 0b0001);
    CHECK((a || b).value == 0b0111);
    CHECK(((!a).value & 0b1111) == 0b1100);
    CHECK((a && true) == a);
    CHECK((true && a) == a);
    CHECK((a && false).value == 0);
    CHECK((a || false) == a);
    CHECK(((false || a)) == a);
    CHECK((!(a || true)).value == 0);
}

TEMPLATE_TEST_CASE("transpose: rows and columns of a square change places", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr int size = lanes<T>::size;
    T numbers[size][size];
    lanes<T> rows[size];
    for (int r = 0; r < size; ++r) {
        for (int c = 0; c < size; ++c) numbers[r][c] = static_cast<T>(100 * r + c);
        rows[r] = lanes<T>::load(numbers[r]);
    }
    simd::transpose<T>(rows);
    for (int r = 0; r < size; ++r)
        for (int c = 0; c < size; ++c) CHECK(numbers_of(rows[r])[static_cast<std::size_t>(c)] == numbers[c][r]);
}

TEST_CASE("unroll: each index once, in order, as a constant", "[simd][portable]") {
    std::vector<int> seen;
    simd::unroll<5>([&](auto i) {
        static_assert(i() >= 0 && i() < 5);
        seen.push_back(i);
    });
    CHECK(seen == std::vector<int>{0, 1, 2, 3, 4});
    simd::unroll<0>([&](auto) { seen.clear(); });
    CHECK(seen.size() == 5);
}

TEST_CASE("unroll: each pair of indices once, row by row, as constants", "[simd][portable]") {
    std::vector<std::pair<int, int>> seen;
    simd::unroll<2, 3>([&](auto i, auto c) { seen.emplace_back(decltype(i)::value, decltype(c)::value); });
    CHECK(seen == std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}});
}

} // namespace attn::testing
