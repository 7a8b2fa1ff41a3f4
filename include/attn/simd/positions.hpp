// Positions of queries as lanes: what a pattern's or a score function's text computes with inside the kernel.
#pragma once

#include "../core/position.hpp"
#include "integer_lanes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

/// Lane l stands at first + l * step. Sums and comparisons with integers keep this form, so they cost a few scalar instructions
/// for all lanes together, at any position, on every instruction set.
template <Scalar T, int Size = lane_count<T>>
struct affine_lanes {
    static constexpr int size = Size;
    using integers = integer_lanes<T, Size>;
    index_t first = 0;
    index_t step = 1;

    constexpr operator integers() const {
        integers result;
        for (std::size_t l = 0; l < size; ++l) result.value[l] = first + static_cast<index_t>(l) * step;
        return result;
    }
    /// The numbers to compute scores with.
    operator lanes<T>() const
        requires(Size == lane_count<T>)
    {
        static constexpr auto count_up = [] {
            std::array<T, static_cast<std::size_t>(size)> numbers{};
            for (std::size_t l = 0; l < size; ++l) numbers[l] = static_cast<T>(l);
            return numbers;
        }();
        return fma(lanes<T>::load(count_up.data()), lanes<T>(static_cast<T>(step)), lanes<T>(static_cast<T>(first)));
    }
    /// Lanes at or before a limit.
    [[gnu::always_inline]] constexpr lane_bits up_to(index_t limit) const {
        if (step == 1) return lane_bits::first(first > limit ? 0 : limit - first + 1);
        if (step == -1) return !lane_bits::first(first > limit ? first - limit : 0);
        return up_to_by_division(limit);
    }

    template <std::integral Index>
    friend constexpr affine_lanes operator+(const affine_lanes& a, Index b) {
        return {a.first + static_cast<index_t>(b), a.step};
    }
    template <std::integral Index>
    friend constexpr affine_lanes operator+(Index a, const affine_lanes& b) {
        return b + a;
    }
    template <std::integral Index>
    friend constexpr affine_lanes operator-(const affine_lanes& a, Index b) {
        return {a.first - static_cast<index_t>(b), a.step};
    }
    template <std::integral Index>
    friend constexpr affine_lanes operator-(Index a, const affine_lanes& b) {
        return {static_cast<index_t>(a) - b.first, -b.step};
    }
    friend constexpr affine_lanes operator-(const affine_lanes& a) { return {-a.first, -a.step}; }
    template <std::integral Index>
    friend constexpr affine_lanes operator*(const affine_lanes& a, Index b) {
        return {a.first * static_cast<index_t>(b), a.step * static_cast<index_t>(b)};
    }
    template <std::integral Index>
    friend constexpr affine_lanes operator*(Index a, const affine_lanes& b) {
        return b * a;
    }
    friend constexpr integers operator/(const affine_lanes& a, index_t c) { return a.counts(c) ? a.divided(c).quotient : integers(a) / c; }
    friend constexpr integers operator%(const affine_lanes& a, index_t c) { return a.counts(c) ? a.divided(c).remainder : integers(a) % c; }
    friend constexpr integers floor_div(const affine_lanes& a, index_t c) {
        return a.counts(c) ? a.divided(c).quotient : floor_div(integers(a), c);
    }
    friend constexpr integers floor_mod(const affine_lanes& a, index_t c) {
        return a.counts(c) ? a.divided(c).remainder : floor_mod(integers(a), c);
    }
    friend constexpr integers abs(const affine_lanes& a) { return abs(integers(a)); }
    template <std::floating_point F>
    friend lanes<T> operator*(F a, const affine_lanes& b) {
        return lanes<T>(a) * static_cast<lanes<T>>(b);
    }

    template <std::integral Index>
    friend constexpr lane_bits operator<=(const affine_lanes& a, Index b) {
        return a.up_to(saturated(b));
    }
    template <std::integral Index>
    friend constexpr lane_bits operator<(const affine_lanes& a, Index b) {
        return a.up_to(saturated(b) - 1);
    }
    template <std::integral Index>
    friend constexpr lane_bits operator>=(const affine_lanes& a, Index b) {
        return !(a < b);
    }
    template <std::integral Index>
    friend constexpr lane_bits operator>(const affine_lanes& a, Index b) {
        return !(a <= b);
    }
    template <std::integral Index>
    friend constexpr lane_bits operator==(const affine_lanes& a, Index b) {
        return a <= b && a >= b;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator!=(const affine_lanes& a, Index b) {
        return !(a == b);
    }
    template <std::integral Index>
    friend constexpr lane_bits operator<=(Index a, const affine_lanes& b) {
        return b >= a;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator<(Index a, const affine_lanes& b) {
        return b > a;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator>=(Index a, const affine_lanes& b) {
        return b <= a;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator>(Index a, const affine_lanes& b) {
        return b < a;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator==(Index a, const affine_lanes& b) {
        return b == a;
    }
    template <std::integral Index>
    friend constexpr lane_bits operator!=(Index a, const affine_lanes& b) {
        return b != a;
    }

private:
    struct division {
        integers quotient, remainder;
    };
    /// Whether one division serves all lanes: where they rise from 0 or more, it rounds the same way for all, and the others count on.
    constexpr bool counts(index_t divisor) const { return first >= 0 && step >= 0 && divisor > 0; }
    constexpr division divided(index_t divisor) const {
        division result;
        const auto quotient_step = step / divisor, remainder_step = step % divisor;
        auto quotient = first / divisor, remainder = first % divisor;
        constexpr int bits = 15;
        if (divisor <= (1 << bits) / size) {
            // What lanes are above `quotient` is a quotient of less than 2^bits, and that a product: exact, for the factor is too large by
            // less than 1 / 2^bits. No lane waits for another.
            const auto narrow_divisor = static_cast<std::uint32_t>(divisor), rest = static_cast<std::uint32_t>(remainder);
            const auto shift = bits + static_cast<int>(std::bit_width(narrow_divisor - 1));
            const auto factor = ((std::uint32_t{1} << shift) + narrow_divisor - 1) / narrow_divisor;
            for (std::uint32_t l = 0; l < size; ++l) {
                const auto above = rest + l * static_cast<std::uint32_t>(remainder_step), over = above * factor >> shift;
                result.quotient.value[l] = quotient + l * quotient_step + over;
                result.remainder.value[l] = above - over * narrow_divisor;
            }
            return result;
        }
        for (std::size_t l = 0; l < size; ++l) {
            result.quotient.value[l] = quotient;
            result.remainder.value[l] = remainder;
            remainder += remainder_step;
            const bool over = remainder >= divisor;
            remainder -= over ? divisor : 0;
            quotient += quotient_step + over;
        }
        return result;
    }
    /// The lanes up to a limit, for any step. A function by itself: clang would inline neither, and call it for each key.
    constexpr lane_bits up_to_by_division(index_t limit) const {
        if (step < 0) return !affine_lanes{-first, -step}.up_to_by_division(-limit - 1);
        if (first > limit) return {0};
        return lane_bits::first(step == 0 ? index_t{size} : (limit - first) / step + 1);
    }
    /// Keeps differences of a limit and a position inside 64 bits: twice as far as two positions can be apart.
    template <std::integral Index>
    static constexpr index_t saturated(Index limit) {
        constexpr index_t farthest = 4 * farthest_position;
        return std::in_range<index_t>(limit) ? std::clamp(static_cast<index_t>(limit), -farthest, farthest) : farthest;
    }
};

/// The queries of one register, what score functions see as `i`; or of a whole panel of up to 64, what patterns see. Lanes from
/// `count` on are padding.
template <Scalar T, int Size = lane_count<T>>
struct query_lanes : affine_lanes<T, Size> {
    int count = Size;

    static constexpr lane_bits mask_from_bits(std::uint64_t bits) { return {bits}; }
};

} // namespace attn::simd
