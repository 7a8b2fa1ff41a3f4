// Integers as lanes, where what is computed of positions is not one arithmetic series.
#pragma once

#include "lanes.hpp"

#include <array>
#include <cstdint>
#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// How many queries one register of T holds.
template <Scalar T>
inline constexpr int lane_count = lanes<T>::size;

/// One integer per lane, computed lane by lane in 64 bits. Exact as in the definition, and only met where a schedule's box is
/// partly visible and the pattern divides; everything cheaper stays in affine_lanes.
template <Scalar T, int Size = lane_count<T>>
struct integer_lanes {
    static constexpr int size = Size;
    std::array<index_t, static_cast<std::size_t>(size)> value;

    constexpr integer_lanes() = default;
    constexpr integer_lanes(index_t same) { value.fill(same); }

    template <class F>
    static constexpr integer_lanes each(const integer_lanes& a, const integer_lanes& b, F f) {
        integer_lanes result;
        for (std::size_t l = 0; l < size; ++l) result.value[l] = f(a.value[l], b.value[l]);
        return result;
    }
    template <class F>
    static constexpr lane_bits test(const integer_lanes& a, const integer_lanes& b, F f) {
        lane_bits bits;
        for (std::size_t l = 0; l < size; ++l) bits.value |= static_cast<std::uint64_t>(f(a.value[l], b.value[l])) << l;
        return bits;
    }
    /// The numbers to compute scores with.
    operator lanes<T>() const
        requires(Size == lane_count<T>)
    {
        T numbers[static_cast<std::size_t>(size)];
        for (std::size_t l = 0; l < size; ++l) numbers[l] = static_cast<T>(value[l]);
        return lanes<T>::load(numbers);
    }

    friend constexpr integer_lanes operator+(const integer_lanes& a, const integer_lanes& b) { return each(a, b, std::plus{}); }
    friend constexpr integer_lanes operator-(const integer_lanes& a, const integer_lanes& b) { return each(a, b, std::minus{}); }
    friend constexpr integer_lanes operator*(const integer_lanes& a, const integer_lanes& b) { return each(a, b, std::multiplies{}); }
    friend constexpr integer_lanes operator/(const integer_lanes& a, const integer_lanes& b) { return each(a, b, std::divides{}); }
    friend constexpr integer_lanes operator%(const integer_lanes& a, const integer_lanes& b) { return each(a, b, std::modulus{}); }
    friend constexpr integer_lanes operator-(const integer_lanes& a) { return integer_lanes(0) - a; }
    friend constexpr integer_lanes floor_div(const integer_lanes& a, index_t c) {
        return each(a, c, [](index_t x, index_t y) { return x / y - (x % y < 0); });
    }
    friend constexpr integer_lanes floor_mod(const integer_lanes& a, index_t c) {
        return each(a, c, [](index_t x, index_t y) { return x % y + (x % y < 0 ? y : 0); });
    }
    friend constexpr integer_lanes abs(const integer_lanes& a) {
        return each(a, a, [](index_t x, index_t) { return x < 0 ? -x : x; });
    }
    friend constexpr lane_bits operator<(const integer_lanes& a, const integer_lanes& b) { return test(a, b, std::less{}); }
    friend constexpr lane_bits operator>(const integer_lanes& a, const integer_lanes& b) { return b < a; }
    friend constexpr lane_bits operator<=(const integer_lanes& a, const integer_lanes& b) { return !(b < a); }
    friend constexpr lane_bits operator>=(const integer_lanes& a, const integer_lanes& b) { return !(a < b); }
    friend constexpr lane_bits operator==(const integer_lanes& a, const integer_lanes& b) { return test(a, b, std::equal_to{}); }
    friend constexpr lane_bits operator!=(const integer_lanes& a, const integer_lanes& b) { return !(a == b); }
    template <std::floating_point F>
    friend lanes<T> operator*(F a, const integer_lanes& b) {
        return lanes<T>(a) * static_cast<lanes<T>>(b);
    }
};

} // namespace attn::simd
