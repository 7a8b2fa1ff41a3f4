// Registers whose lanes hold two 16-bit numbers each.
#pragma once

#include "narrow.hpp"
#include "transpose.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// As many pairs of 16-bit numbers as a register has floats, as they stand next to each other in memory: transposed so, they take half the
/// shuffles.
template <narrow_format format>
struct narrow_pairs {
    using batch = xsimd::batch<float>;
    static constexpr int size = static_cast<int>(batch::size);
    using vector = typename detail::vector_of<std::uint32_t, size>::type;

    vector bits; ///< bfloat16: the first in the lower half

    static narrow_pairs load(const void* from) {
        narrow_pairs result;
        std::memcpy(&result.bits, from, sizeof result.bits);
        if constexpr (format == narrow_format::bfloat16 && std::endian::native == std::endian::big)
            result.bits = result.bits << 16 | result.bits >> 16;
        return result;
    }
    /// The first number of each lane.
    batch first() const {
        if constexpr (format == narrow_format::bfloat16) return std::bit_cast<batch>(bits << 16);
        else return every_second<0>(lane);
    }
    /// The second number of each lane.
    batch second() const {
        if constexpr (format == narrow_format::bfloat16) return std::bit_cast<batch>(bits & 0xffff0000);
        else return every_second<1>(lane);
    }

private:
    static constexpr auto lane = std::make_integer_sequence<int, size>{};
    template <int Begin, int... Index>
    batch every_second(std::integer_sequence<int, Index...>) const {
        typename detail::vector_of<std::uint16_t, 2 * size>::type all;
        std::memcpy(&all, &bits, sizeof bits);
        const auto some = __builtin_shufflevector(all, all, (Begin + 2 * Index)...);
        std::uint16_t numbers[std::size_t{size}];
        std::memcpy(numbers, &some, sizeof some);
        return narrow_lanes<format>::widen(numbers);
    }
};

} // namespace attn::simd
