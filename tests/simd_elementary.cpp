// Elementary functions of registers: their errors in units in the last place, their special values, and their bits, which are those of every
// instruction set that fuses products with sums.
#include "catch.hpp"
#include "fingerprint.hpp"

#include <attn/simd/elementary.hpp>
#include <attn/simd/exp.hpp>

#include <bit>
#include <cmath>
#include <functional>
#include <random>

namespace attn::testing {

namespace {

template <Scalar T>
using registers = simd::lanes<T>;
template <Scalar T>
using wider_number = std::conditional_t<sizeof(T) == 4, double, long double>;
template <Scalar T>
using bits_type = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// A function, what it should be, what it may be off by, in units in the last place, and between which numbers.
template <Scalar T>
struct tested_function {
    const char* name;
    std::function<registers<T>(registers<T>)> ours;
    std::function<wider_number<T>(wider_number<T>)> exact;
    double bound;
    std::vector<std::pair<double, double>> ranges;
    T farthest = std::numeric_limits<T>::infinity(); ///< beyond, it is NaN
};

template <Scalar T>
std::vector<tested_function<T>> tested_functions() {
    using X = registers<T>;
    using W = wider_number<T>;
    const auto far = static_cast<T>(sizeof(T) == 4 ? 0x1p40 : 0x1p64);
    const double of_pow = simd::fuses ? 3 : 8, most = sizeof(T) == 4 ? 105 : 746, farthest = sizeof(T) == 4 ? 1e6 : 1e15;
    std::vector<tested_function<T>> all{
        {"exp", [](X x) { return exp(x); }, [](W x) { return std::exp(x); }, 1, {{-1, 1}, {-most, most}}},
        {"log", [](X x) { return log(x); }, [](W x) { return std::log(x); }, 1, {{0, 4}, {0.9, 1.1}}},
        {"log1p", [](X x) { return log1p(x); }, [](W x) { return std::log1p(x); }, 1.5, {{-1, 4}, {-1e-7, 1e-7}}},
        {"tanh", [](X x) { return tanh(x); }, [](W x) { return std::tanh(x); }, 2.6, {{-1, 1}, {-20, 20}}},
        {"erf", [](X x) { return erf(x); }, [](W x) { return std::erf(x); }, 1.4, {{-1, 1}, {-6, 6}}},
        {"sin", [](X x) { return sin(x); }, [](W x) { return std::sin(x); }, 1, {{-4, 4}, {-farthest, farthest}}, far},
        {"cos", [](X x) { return cos(x); }, [](W x) { return std::cos(x); }, 1, {{-4, 4}, {-farthest, farthest}}, far},
    };
    for (const double y : {2.0, 0.5, -1.5, 3.7, 10.0}) {
        const auto exponent = static_cast<T>(y);
        all.push_back({"pow",
                       [=](X x) { return pow(x, exponent); },
                       [=](W x) { return std::pow(x, static_cast<W>(exponent)); },
                       of_pow,
                       {{0, 10}, {0, 1e3}}});
        const auto base = static_cast<T>(std::abs(y));
        all.push_back({"pow of a number",
                       [=](X x) { return pow(base, x); },
                       [=](W x) { return std::pow(static_cast<W>(base), x); },
                       of_pow,
                       {{-2, 2}, {-most, most}}});
    }
    return all;
}

/// Numbers of every size and sign, the special ones among them, or of a range.
template <Scalar T>
std::vector<T> numbers_of(std::mt19937_64& random, std::size_t count) {
    std::vector<T> all(count);
    for (auto& x : all) x = std::bit_cast<T>(static_cast<bits_type<T>>(random()));
    constexpr auto infinity = std::numeric_limits<T>::infinity();
    std::size_t at = 0;
    for (const T x : {T(0), T(1), infinity, std::numeric_limits<T>::max(), std::numeric_limits<T>::min(),
                      std::numeric_limits<T>::denorm_min(), T(2), T(0.5), T(3)})
        all[at++] = x, all[at++] = -x;
    all[at] = std::numeric_limits<T>::quiet_NaN();
    return all;
}
template <Scalar T>
std::vector<T> numbers_of(std::mt19937_64& random, std::size_t count, std::pair<double, double> range) {
    std::vector<T> all(count);
    for (auto& x : all)
        x = static_cast<T>(std::fma(range.second - range.first, static_cast<double>(random() >> 11) * 0x1p-53, range.first));
    return all;
}

/// How far a result is off, in units in the last place of the exact one; 0 if both are NaN, or the same infinity.
template <Scalar T>
double error_of(T found, wider_number<T> exact) {
    const auto wanted = static_cast<T>(exact);
    if (std::isnan(found) || std::isnan(wanted)) return std::isnan(found) && std::isnan(wanted) ? 0 : 1e300;
    if (std::isinf(found) || std::isinf(wanted)) {
        // Just within the largest number, or just beyond.
        const auto largest = std::numeric_limits<T>::max();
        return found == wanted || (std::abs(found) >= largest && std::abs(wanted) >= largest && (found > 0) == (wanted > 0)) ? 0 : 1e300;
    }
    const auto exponent =
        exact == 0 ? std::numeric_limits<T>::min_exponent - 1 : std::max(std::ilogb(exact), std::numeric_limits<T>::min_exponent - 1);
    return static_cast<double>(std::abs(static_cast<wider_number<T>>(found) - exact) /
                               std::ldexp(wider_number<T>{1}, exponent - (std::numeric_limits<T>::digits - 1)));
}

template <Scalar T>
std::vector<T> results_of(const tested_function<T>& f, const std::vector<T>& x) {
    std::vector<T> all(x.size());
    simd::for_each_register<T>(std::ssize(x),
                               [&](index_t at, auto load, auto store) { store(f.ours(load(x.data() + at)), all.data() + at); });
    return all;
}

} // namespace

TEMPLATE_TEST_CASE("elementary functions: errors and special values", "[simd][portable]", ATTN_TEST_NUMBERS) {
    std::mt19937_64 random(7);
    for (const auto& f : tested_functions<TestType>()) {
        std::vector<std::vector<TestType>> arguments{numbers_of<TestType>(random, 4'000)};
        for (const auto& range : f.ranges) arguments.push_back(numbers_of<TestType>(random, 20'000, range));
        for (const auto& x : arguments) {
            const auto found = results_of(f, x);
            double worst = 0;
            TestType at{};
            for (std::size_t i = 0; i < x.size(); ++i) {
                if (std::abs(x[i]) > f.farthest && std::isnan(found[i])) continue;
                const auto error = error_of(found[i], f.exact(static_cast<wider_number<TestType>>(x[i])));
                if (error > worst) worst = error, at = x[i];
            }
            CAPTURE(f.name, at, worst);
            CHECK(worst <= f.bound);
        }
    }
}

TEMPLATE_TEST_CASE("elementary functions: pow has the special values of C", "[simd][portable]", ATTN_TEST_NUMBERS) {
    constexpr auto infinity = std::numeric_limits<TestType>::infinity(), largest = std::numeric_limits<TestType>::max();
    const TestType nan = std::numeric_limits<TestType>::quiet_NaN(), tiny = std::numeric_limits<TestType>::denorm_min();
    const std::vector<TestType> special{0, 1, 2, 3, TestType(0.5), TestType(2.5), tiny, largest, infinity, nan};
    for (const auto x : special)
        for (const auto y : special)
            for (const auto& [a, b] : {std::pair(x, y), std::pair(-x, y), std::pair(x, -y), std::pair(-x, -y)}) {
                const auto found = simd::pow(a, b), wanted = std::pow(a, b);
                CAPTURE(a, b, found, wanted);
                CHECK(error_of<TestType>(found, std::pow(static_cast<wider_number<TestType>>(a), static_cast<wider_number<TestType>>(b))) <=
                      1.5);
                if (!std::isnan(wanted)) CHECK(std::signbit(found) == std::signbit(wanted));
            }
}

TEMPLATE_TEST_CASE("elementary functions: the same bits on every instruction set that fuses", "[simd][portable]", ATTN_TEST_NUMBERS) {
    std::mt19937_64 random(8);
    fingerprint bits;
    const auto add = [&](const std::vector<TestType>& results) { bits.add(std::span(results)); };
    auto functions = tested_functions<TestType>();
    functions.push_back(
        {"exp_nonpositive", [](registers<TestType> x) { return simd::exp_nonpositive(-abs(x)); }, {}, 0, {{0, 1}, {0, 90}, {0, 800}}});
    for (const auto& f : functions) {
        add(results_of(f, numbers_of<TestType>(random, 20'000)));
        for (const auto& range : f.ranges) add(results_of(f, numbers_of<TestType>(random, 20'000, range)));
    }
    constexpr std::uint64_t fused = sizeof(TestType) == 4 ? 0x71816b8bea395aafu : 0xa8bc68318c161430u,
                            rounded_twice = sizeof(TestType) == 4 ? 0x1b198d5c2b0980cau : 0xdec0662f0807a2fau;
    CHECK(bits.value() == (simd::fuses ? fused : rounded_twice));
}

} // namespace attn::testing
