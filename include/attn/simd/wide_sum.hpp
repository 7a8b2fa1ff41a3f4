// Sums over the numbers of a row, in one order for all instruction sets.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Sums of 16 floats (8 doubles) at a time: number c of a row is added in place c modulo 16, be that one register or four, and the places are
/// added as a tree of halves.
template <Scalar T>
struct wide_sum {
    using lanes = simd::lanes<T>;
    static constexpr int size = 64 / sizeof(T), parts = size / lanes::size;
    std::array<lanes, static_cast<std::size_t>(parts)> part;

    wide_sum() { part.fill(lanes(T{0})); }

    T total() const {
        auto sums = part;
        for (auto half = sums.size() / 2; half > 0; half /= 2)
            for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
        return sum(sums[0]);
    }
};

/// Calls f(c, part) for the registers of a row of so many numbers, c = 0, lanes<T>::size, ...; part, of a wide_sum, is a constant.
template <Scalar T>
[[gnu::always_inline]] inline void for_each_part(index_t count, const auto& f) {
    constexpr index_t size = lanes<T>::size;
    for (index_t c = 0; c < count; c += wide_sum<T>::size)
        unroll<wide_sum<T>::parts>([&](auto k) {
            if (c + k() * size < count) f(c + k() * size, std::integral_constant<std::size_t, static_cast<std::size_t>(k())>());
        });
}

} // namespace attn::simd
