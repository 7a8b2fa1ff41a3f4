// Random numbers that are the same with every compiler and standard library, whose distributions are not.
#pragma once

#include <attn/core/tensor.hpp>

#include <algorithm>
#include <cstdint>
#include <random>

namespace attn::testing {

/// The limit of numbers whose deviation is 1.
template <Scalar T>
inline constexpr T unit_limit = T(1.7320508);

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

/// A number of such a deviation, as normally distributed parameters have one.
template <Scalar T>
T random_parameter(std::mt19937& random, T deviation) {
    return random_number(random, deviation * unit_limit<T>);
}

/// A tensor of random numbers.
template <Scalar T>
tensor<T> random_tensor(const shape& s, unsigned seed, T limit = 2) {
    tensor<T> result(s);
    std::mt19937 random(seed);
    std::generate_n(result.data(), s.size(), [&] { return random_number(random, limit); });
    return result;
}
/// A tensor of random parameters, of deviation 1.
template <Scalar T>
tensor<T> random_parameters(const shape& s, unsigned seed) {
    return random_tensor(s, seed, unit_limit<T>);
}

} // namespace attn::testing
