// Random numbers from a seed, the same with every compiler and standard library, whose distributions are not.
#pragma once

#include "scalar.hpp"

#include <cstdint>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Independent random numbers, all equally likely.
struct random_numbers {
    std::uint64_t seed;

    /// One in (0, 1), by splitmix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators").
    double operator()() {
        auto x = seed += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return static_cast<double>((x ^ x >> 31) >> 11) * 0x1p-53 + 0x1p-54;
    }
};

} // namespace attn::detail
