// 2^x: at most two units in the last place, over the whole range.
#include "catch.hpp"

#include <attn/simd/exp.hpp>

#include <bit>
#include <cmath>
#include <random>

namespace attn::testing {

namespace {

template <Scalar T>
using lanes = simd::lanes<T, simd::native>;

/// The largest error among the lanes, in units in the last place of the exact result, which must not be subnormal.
template <Scalar T>
double largest_ulps(const std::array<T, lanes<T>::size>& x) {
    std::array<T, lanes<T>::size> ours;
    simd::exp2_nonpositive<T, simd::native>(lanes<T>::load(x.data())).store(ours.data());
    double worst = 0;
    for (std::size_t l = 0; l < x.size(); ++l) {
        using wider = std::conditional_t<sizeof(T) == 4, double, long double>;
        const auto exact = std::exp2(static_cast<wider>(x[l]));
        const auto unit = std::ldexp(wider{1}, std::ilogb(exact) - (std::numeric_limits<T>::digits - 1));
        const auto error = static_cast<double>(std::abs(static_cast<wider>(ours[l]) - exact) / unit);
        worst = error <= worst ? worst : std::isnan(error) ? 1e300 : error;
    }
    return worst;
}

/// Every stride-th float from -126 to -0.
double largest_ulps_of_floats(std::uint32_t stride) {
    constexpr auto first = std::bit_cast<std::uint32_t>(-0.0f), last = std::bit_cast<std::uint32_t>(-126.0f);
    double worst = 0;
    std::array<float, lanes<float>::size> x;
    for (auto bits = first; bits <= last;) {
        for (auto& number : x) {
            number = std::bit_cast<float>(std::min(bits, last));
            bits += stride;
        }
        worst = std::max(worst, largest_ulps<float>(x));
    }
    return worst;
}

template <Scalar T>
T exp2_of(T x) {
    std::array<T, lanes<T>::size> result;
    simd::exp2_nonpositive<T, simd::native>(lanes<T>(x)).store(result.data());
    return result.back();
}

} // namespace

TEST_CASE("exp2_nonpositive: floats from 0 to the smallest normal result", "[simd][portable]") { CHECK(largest_ulps_of_floats(9973) <= 2); }

TEST_CASE("exp2_nonpositive: every 37th float", "[simd]") { CHECK(largest_ulps_of_floats(37) <= 2); }

TEST_CASE("exp2_nonpositive: doubles from 0 to the smallest normal result", "[simd][portable]") {
    std::mt19937_64 random(3);
    double worst = 0;
    std::array<double, lanes<double>::size> x;
    for (const double most : {1e-300, 1e-17, 1e-3, 0.5, 1.0, 2.0, 50.0, 1022.0}) {
        std::uniform_real_distribution<double> number(-most, 0);
        for (int round = 0; round < 5'000; ++round) {
            for (auto& n : x) n = number(random);
            worst = std::max(worst, largest_ulps<double>(x));
        }
    }
    // Halfway between two integers the polynomial is at the end of its range.
    for (int k = 0; k < 1021; ++k)
        for (const double near : {-1e-13, 0.0, 1e-13}) {
            x.fill(-k - 0.5 + near);
            worst = std::max(worst, largest_ulps<double>(x));
        }
    CHECK(worst <= 2);
}

TEMPLATE_TEST_CASE("exp2_nonpositive: exact values and special ones", "[simd][portable]", float, double) {
    using limits = std::numeric_limits<TestType>;
    CHECK(exp2_of<TestType>(0) == 1);
    CHECK(exp2_of<TestType>(TestType{-0.0}) == 1);
    for (int k = 1; k < -limits::min_exponent; ++k) CHECK(exp2_of(static_cast<TestType>(-k)) == std::ldexp(TestType{1}, -k));
    CHECK(exp2_of(-limits::infinity()) == 0);
    CHECK(exp2_of(limits::lowest()) == 0);
    CHECK(exp2_of(limits::lowest() / 2) == 0);
    CHECK(exp2_of(TestType{-1e5}) == 0);
    CHECK(std::isnan(exp2_of(limits::quiet_NaN())));
    CHECK(exp2_of(-limits::min()) == 1);
    CHECK(exp2_of(-limits::denorm_min()) == 1);
}

TEMPLATE_TEST_CASE("exp2_nonpositive: a subnormal result is itself or 0", "[simd][portable]", float, double) {
    using limits = std::numeric_limits<TestType>;
    const auto lowest = static_cast<TestType>(limits::min_exponent - 1);
    for (TestType x = lowest; x > lowest - limits::digits - 4; x -= TestType(0.37)) {
        const auto ours = exp2_of(x), exact = std::exp2(x);
        CHECK((ours == 0 || std::abs(ours - exact) <= 2 * limits::denorm_min()));
    }
}

} // namespace attn::testing
