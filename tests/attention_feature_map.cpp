// The library's feature maps by themselves, on numbers and on lanes: what they promise of signs, extremes and NaN.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/attention/feature_map.hpp>
#include <attn/simd/elementary.hpp>
#include <attn/simd/lanes.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
std::vector<T> telling_numbers() {
    using limits = std::numeric_limits<T>;
    std::vector<T> numbers{limits::infinity(), limits::max(), T(1000), T(3.5), T(1), T(1e-3), limits::min(), limits::denorm_min(), T(0)};
    for (std::size_t i = numbers.size(); i-- > 0;) numbers.push_back(-numbers[i]);
    return numbers;
}

template <Scalar T>
T in_a_lane(const auto& phi, T x) {
    using lanes = simd::lanes<T>;
    T out[lanes::size];
    static_cast<lanes>(phi(lanes(x))).store(out);
    return out[lanes::size - 1];
}

} // namespace

TEMPLATE_TEST_CASE("feature maps that are one instruction: the same bits on numbers and lanes, and once is as good as twice", "[linear][portable]",
                   ATTN_TEST_NUMBERS) {
    const auto check = []<FeatureMap Phi>(const Phi& phi, auto expected) {
        STATIC_REQUIRE(Phi::idempotent);
        for (const auto x : telling_numbers<TestType>()) {
            INFO(x);
            CHECK(same_bits(phi(x), expected(x)));
            CHECK(same_bits(in_a_lane(phi, x), expected(x)));
            CHECK(same_bits(in_a_lane(phi, in_a_lane(phi, x)), expected(x)));
        }
        CHECK(std::isnan(phi(std::numeric_limits<TestType>::quiet_NaN())));
        CHECK(std::isnan(in_a_lane(phi, std::numeric_limits<TestType>::quiet_NaN())));
    };
    check(identity_features{}, [](TestType x) { return x; });
    check(relu{}, [](TestType x) { return std::signbit(x) && x != 0 ? TestType(0) : x; });
}

TEMPLATE_TEST_CASE("elu_plus_one: positive wherever e^x is, rising, finite where x is", "[linear][portable]", ATTN_TEST_NUMBERS) {
    const elu_plus_one phi;
    STATIC_REQUIRE(FeatureMap<elu_plus_one>);
    for (const auto x : telling_numbers<TestType>()) {
        INFO(x);
        const auto of_lane = static_cast<double>(in_a_lane(phi, x)), of_number = static_cast<double>(phi(x));
        const auto exact = x > 0 ? static_cast<double>(x) + 1 : std::exp(static_cast<double>(x));
        for (const auto ours : {of_lane, of_number}) {
            CHECK((ours == exact || std::abs(ours - exact) <= 4 * epsilon<TestType> * exact));
            CHECK(std::isinf(ours) == (x == std::numeric_limits<TestType>::infinity()));
        }
    }
    for (const TestType x : {TestType(-80), TestType(-20), TestType(-1e-3), TestType(0), TestType(1e-3), TestType(20)}) {
        CHECK(in_a_lane(phi, x) > 0);
        CHECK(in_a_lane(phi, x) > in_a_lane(phi, TestType(x - 1)));
    }
    CHECK(std::isnan(phi(std::numeric_limits<TestType>::quiet_NaN())));
    CHECK(std::isnan(in_a_lane(phi, std::numeric_limits<TestType>::quiet_NaN())));
}

} // namespace attn::testing
