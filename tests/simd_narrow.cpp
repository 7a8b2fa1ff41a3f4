// 16-bit numbers in registers of floats.
#include "catch.hpp"

#include <attn/simd/narrow.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace attn::testing {

namespace {

template <class S>
using converter = simd::narrow_lanes<narrow_format_of<S>>;

template <class S>
S of_bits(std::uint32_t bits) {
    return std::bit_cast<S>(static_cast<std::uint16_t>(bits));
}
template <class S>
std::uint16_t bits_of(S number) {
    std::uint16_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

/// Whether the register's conversion is the number's, and that Eigen's, but for the bits of NaN.
template <class S>
bool narrows_as_eigen(const std::vector<float>& numbers) {
    constexpr auto size = converter<S>::size;
    for (std::size_t at = 0; at + size <= numbers.size(); at += size) {
        std::array<std::uint16_t, size> ours;
        converter<S>::narrow(converter<S>::batch::load_unaligned(numbers.data() + at), ours.data());
        for (std::size_t l = 0; l < size; ++l) {
            const auto x = numbers[at + l];
            const auto eigen = bits_of(static_cast<S>(x)), alone = detail::narrowed<narrow_format_of<S>>(x);
            const bool is_nan = (ours[l] & 0x7fff) > (narrow_format_of<S> == narrow_format::half ? 0x7c00 : 0x7f80);
            if (ours[l] != alone || (std::isnan(x) ? !is_nan : ours[l] != eigen)) {
                FAIL_CHECK("bits " << std::bit_cast<std::uint32_t>(x) << " become " << ours[l] << ", alone " << alone << ", by Eigen " << eigen);
                return false;
            }
        }
    }
    return true;
}

} // namespace

TEMPLATE_TEST_CASE("narrow numbers widen exactly, all 65,536 of them", "[simd][portable]", Eigen::bfloat16, Eigen::half) {
    constexpr auto size = converter<TestType>::size;
    bool all_right = true;
    for (std::uint32_t first = 0; first < 65536; first += size) {
        std::array<std::uint16_t, size> bits;
        for (std::size_t l = 0; l < size; ++l) bits[l] = static_cast<std::uint16_t>(first + l);
        std::array<float, size> wide;
        converter<TestType>::widen(bits.data()).store_unaligned(wide.data());
        for (std::size_t l = 0; l < size; ++l) {
            const auto alone = detail::widened<narrow_format_of<TestType>>(bits[l]), eigen = static_cast<float>(of_bits<TestType>(bits[l]));
            const bool same = std::bit_cast<std::uint32_t>(wide[l]) == std::bit_cast<std::uint32_t>(alone);
            if (same && (std::isnan(eigen) ? std::isnan(alone) && std::signbit(alone) == std::signbit(eigen) : alone == eigen && std::signbit(alone) == std::signbit(eigen))) continue;
            if (all_right) FAIL_CHECK("bits " << bits[l] << " widen to " << wide[l] << ", alone " << alone << ", by Eigen " << eigen);
            all_right = false;
        }
    }
    CHECK(all_right);
}

TEMPLATE_TEST_CASE("floats narrow to the nearest number, of two the even one", "[simd][portable]", Eigen::bfloat16, Eigen::half) {
    std::vector<float> numbers;
    // Each number, what lies halfway to its neighbours, and the floats beside these.
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const auto x = detail::widened<narrow_format_of<TestType>>(static_cast<std::uint16_t>(bits));
        const auto next = detail::widened<narrow_format_of<TestType>>(static_cast<std::uint16_t>(bits + 1));
        const auto between = static_cast<float>((static_cast<double>(x) + static_cast<double>(next)) / 2);
        constexpr auto infinity = std::numeric_limits<float>::infinity();
        for (const auto y : {x, between})
            for (const auto z : {y, std::nextafter(y, infinity), std::nextafter(y, -infinity)}) numbers.push_back(z);
    }
    CHECK(narrows_as_eigen<TestType>(numbers));
    std::mt19937 random(5);
    for (auto& x : numbers) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    CHECK(narrows_as_eigen<TestType>(numbers));
}

} // namespace attn::testing
