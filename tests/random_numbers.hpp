// Random numbers that are the same with every compiler and standard library, whose distributions are not.
#pragma once

#include <attn/core/scalar.hpp>

#include <cstdint>
#include <random>

namespace attn::testing {

/// A number between -limit and limit, all equally likely: one of 2^24 for floats, of 2^53 for doubles, times the limit.
template <Scalar T>
T random_number(std::mt19937& random, T limit) {
    if constexpr (sizeof(T) == 4) {
        return limit * (static_cast<T>(static_cast<std::int32_t>(random() >> 8) - (1 << 23)) * T(0x1p-23));
    } else {
        const auto bits = std::uint64_t{random()} << 32 | random();
        return limit * (static_cast<T>(static_cast<std::int64_t>(bits >> 11) - (std::int64_t{1} << 52)) * T(0x1p-52));
    }
}

/// The same with a deviation of so much, as normally distributed parameters would have.
template <Scalar T>
T random_parameter(std::mt19937& random, T deviation) {
    return random_number(random, deviation * T(1.7320508));
}

} // namespace attn::testing
