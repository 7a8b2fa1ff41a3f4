// Sums over the numbers of a row, in one order for all instruction sets.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Sums of so many bytes of numbers at a time, in places: number c of a row of floats is added in place c modulo 16 of 64 bytes, be they
/// one register or four; and the places are added as a tree of halves.
template <Scalar T, int bytes = 64>
struct wide_sum {
    using lanes = simd::lanes<T>;
    static constexpr int size = bytes / sizeof(T), parts = size / lanes::size;
    lanes part[std::size_t{parts}];

    wide_sum() {
        unroll<parts>([&](auto k) { part[k] = lanes(T{0}); });
    }

    /// Adds numbers, or their products, to a part.
    [[gnu::always_inline]] void add(std::size_t to, lanes x) { part[to] += x; }
    [[gnu::always_inline]] void add(std::size_t to, lanes a, lanes b) { part[to] = fma(a, b, part[to]); }

    /// The sum of 64 bytes of places.
    [[gnu::always_inline]] lanes folded() const {
        if constexpr (parts == 1) return part[0];
        else if constexpr (parts == 2) return part[0] + part[1];
        else if constexpr (parts == 4) return (part[0] + part[2]) + (part[1] + part[3]);
        else return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }
    T total() const { return sum(folded()); }
};

/// Calls f(c, part, count) for the registers of a row of so many numbers, c = 0, lanes<T>::size, ...: part, of a wide_sum, is a constant,
/// and count says how many numbers the register has: all, but of the last.
template <Scalar T, int bytes = 64>
[[gnu::always_inline]] inline void for_each_part(index_t channels, const auto& f) {
    constexpr index_t size = lanes<T>::size, wide = wide_sum<T, bytes>::size;
    const auto call = [&](auto k, index_t c, index_t count) __attribute__((always_inline)) {
        f(c, std::integral_constant<std::size_t, static_cast<std::size_t>(k())>(), count);
    };
    index_t c = 0;
    for (; c + wide <= channels; c += wide)
        unroll<wide_sum<T, bytes>::parts>([&](auto k) __attribute__((always_inline)) { call(k, c + k() * size, size); });
    unroll<wide_sum<T, bytes>::parts>([&](auto k) __attribute__((always_inline)) {
        const auto left = channels - (c + k() * size);
        if (left >= size) call(k, c + k() * size, size);
        else if (left > 0) call(k, c + k() * size, left);
    });
}

} // namespace attn::simd
