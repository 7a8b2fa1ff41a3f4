// e^x: its error in units in the last place, over the whole range.
#include "catch.hpp"

#include <attn/simd/exp.hpp>

#include <bit>
#include <cmath>
#include <numbers>
#include <random>

namespace attn::testing {

namespace {

template <Scalar T>
using lanes = simd::lanes<T>;

/// What the error may be, in units in the last place: two, and |x| times the error of log2(e), or of a product with it that is rounded by itself.
template <Scalar T>
double allowed(T x) {
    constexpr double of_log2e = simd::fuses ? 0.5 : 1.5;
    return 2 + of_log2e * std::abs(static_cast<double>(x));
}

/// The largest error among the lanes, as a multiple of what it may be. The exact result must not be subnormal.
template <Scalar T>
double largest_error(const std::array<T, lanes<T>::size>& x) {
    std::array<T, lanes<T>::size> ours;
    simd::exp_nonpositive<T>(lanes<T>::load(x.data())).store(ours.data());
    double worst = 0;
    for (std::size_t l = 0; l < x.size(); ++l) {
        using wider = std::conditional_t<sizeof(T) == 4, double, long double>;
        const auto exact = std::exp(static_cast<wider>(x[l]));
        const auto unit = std::ldexp(wider{1}, std::ilogb(exact) - (std::numeric_limits<T>::digits - 1));
        const auto error = static_cast<double>(std::abs(static_cast<wider>(ours[l]) - exact) / unit) / allowed(x[l]);
        worst = error <= worst ? worst : std::isnan(error) ? 1e300 : error;
    }
    return worst;
}

/// Every stride-th float from -87.29 to -0.
double largest_error_of_floats(std::uint32_t stride) {
    constexpr auto first = std::bit_cast<std::uint32_t>(-0.0f), last = std::bit_cast<std::uint32_t>(-87.29f);
    double worst = 0;
    std::array<float, lanes<float>::size> x;
    for (auto bits = first; bits <= last;) {
        for (auto& number : x) {
            number = std::bit_cast<float>(std::min(bits, last));
            bits += stride;
        }
        worst = std::max(worst, largest_error<float>(x));
    }
    return worst;
}

template <Scalar T>
T exp_of(T x) {
    std::array<T, lanes<T>::size> result;
    simd::exp_nonpositive<T>(lanes<T>(x)).store(result.data());
    return result.back();
}

} // namespace

TEST_CASE("exp_nonpositive: floats from 0 to the smallest results", "[simd][portable]") { CHECK(largest_error_of_floats(9973) <= 1); }

TEST_CASE("exp_nonpositive: every 37th float", "[simd][arithmetic]") { CHECK(largest_error_of_floats(37) <= 1); }

TEST_CASE("exp_nonpositive: doubles from 0 to the smallest normal result", "[simd][portable]") {
    std::mt19937_64 random(3);
    double worst = 0;
    std::array<double, lanes<double>::size> x;
    for (const double limit : {1e-300, 1e-17, 1e-3, 0.5, 1.0, 2.0, 50.0, 708.0}) {
        std::uniform_real_distribution<double> number(-limit, 0);
        for (int round = 0; round < 5'000; ++round) {
            for (auto& n : x) n = number(random);
            worst = std::max(worst, largest_error<double>(x));
        }
    }
    // Halfway between two powers of two the polynomial is at the end of its range.
    for (int k = 0; k < 1021; ++k)
        for (const double near : {-1e-13, 0.0, 1e-13}) {
            x.fill((-k - 0.5) * std::numbers::ln2 + near);
            worst = std::max(worst, largest_error<double>(x));
        }
    CHECK(worst <= 1);
}

TEMPLATE_TEST_CASE("exp_nonpositive: exact values and special ones", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using limits = std::numeric_limits<TestType>;
    CHECK(exp_of<TestType>(0) == 1);
    CHECK(exp_of<TestType>(TestType{-0.0}) == 1);
    CHECK(exp_of(-limits::infinity()) == 0);
    CHECK(exp_of(limits::lowest()) == 0);
    CHECK(exp_of(limits::lowest() / 2) == 0);
    CHECK(exp_of(TestType{-1e5}) == 0);
    CHECK(exp_of(TestType(-1e19)) == 0);
    using bits = std::conditional_t<sizeof(TestType) == 4, std::uint32_t, std::uint64_t>;
    for (bits payload : {0x0u, 0x1u, 0x81u, 0xffu, 0x1234u}) // an exponent that is added to its bits would make a number of it
        CHECK(std::isnan(exp_of(std::bit_cast<TestType>(std::bit_cast<bits>(limits::quiet_NaN()) | payload))));
    CHECK(exp_of(-limits::min()) == 1);
    CHECK(exp_of(-limits::denorm_min()) == 1);
}

TEMPLATE_TEST_CASE("exp_nonpositive: a subnormal result is 0", "[simd][portable]", ATTN_TEST_NUMBERS) {
    using limits = std::numeric_limits<TestType>;
    const auto lowest = static_cast<TestType>((limits::min_exponent - 1) * std::numbers::ln2);
    CHECK(exp_of(lowest * TestType(0.999)) >= limits::min());
    for (TestType x = lowest * TestType(1.001); x > lowest - limits::digits - 4; x -= TestType(0.37)) CHECK(exp_of(x) == 0);
}

} // namespace attn::testing
