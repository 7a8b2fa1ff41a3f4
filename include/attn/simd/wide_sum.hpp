// Sums over the numbers of a row, in one order for all instruction sets.
#pragma once

#include "lanes.hpp"
#include "unroll.hpp"

#include <concepts>

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
    [[gnu::always_inline]] void add(auto to, lanes x) {
        change(to, [&](lanes& sum) __attribute__((always_inline)) { sum += x; });
    }
    [[gnu::always_inline]] void add(auto to, lanes a, lanes b) {
        change(to, [&](lanes& sum) __attribute__((always_inline)) { sum = fma(a, b, sum); });
    }

    /// The sum of 64 bytes of places.
    [[gnu::always_inline]] lanes folded() const {
        if constexpr (parts == 1) return part[0];
        else if constexpr (parts == 2) return part[0] + part[1];
        else if constexpr (parts == 4) return (part[0] + part[2]) + (part[1] + part[3]);
        else return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }
    T total() const { return sum(folded()); }

private:
    /// An index that is no constant would put the parts into memory, so it is compared with those that are.
    [[gnu::always_inline]] void change(auto to, const auto& f) {
        if constexpr (!std::integral<decltype(to)>) f(part[to()]);
        else if constexpr (parts == 1) f(part[0]);
        else
            unroll<parts>([&](auto k) __attribute__((always_inline)) {
                if (to == k()) f(part[k]);
            });
    }
};

/// Calls f(c, part, count) for the registers of a row of so many numbers, c = 0, lanes<T>::size, ...: part of a wide_sum, and how many
/// numbers the register has. Both are constants in whole rounds of parts; behind them the part is a number, and so is the last count.
template <Scalar T, int bytes = 64>
[[gnu::always_inline]] inline void for_each_part(index_t channels, const auto& f) {
    constexpr index_t size = lanes<T>::size, wide = wide_sum<T, bytes>::size;
    constexpr std::integral_constant<index_t, size> all;
    index_t c = 0;
    for (; c + wide <= channels; c += wide)
        unroll<wide_sum<T, bytes>::parts>([&](auto k) __attribute__((always_inline)) { f(c + k() * size, k, all); });
    int part = 0;
    for (; c + size <= channels; c += size) f(c, part++, all);
    if (c < channels) f(c, part, channels - c);
}

} // namespace attn::simd
