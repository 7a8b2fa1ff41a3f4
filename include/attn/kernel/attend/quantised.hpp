// Rows of numbers in 8 or 4 bits, in groups of channels that have a scale each.
#pragma once

#include "../../simd/small_integers.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A register of numbers from multiples in 8 or 4 bits.
template <int Bits, Scalar T>
struct dequantised_lanes {
    using lanes = simd::lanes<T>;
    using integers = simd::small_integers<T>;
    lanes scale, least;

    /// From the multiples of a register; shift: which bit of a byte is the first.
    [[gnu::always_inline]] lanes operator()(const std::byte* multiples, int shift) const {
        if constexpr (Bits == 8) return scale * integers::template load<true>(multiples).numbers();
        else return fma(scale, integers::template load<false>(multiples).four_bits(shift), least);
    }
};

/// How a row of channels lies in so many bits a number: for each group of 32 channels, the last of which may have fewer, what its numbers
/// are multiples of, a float, and in 4 bits the least of them, another; then the multiples q, of all groups.
///     8 bits    x = scale q,          q = -127 .. 127
///     4 bits    x = least + scale q,  q = 0 .. 15, rounded once; a byte holds one of each half of the group, the first in the lower bits
struct quantised_rows {
    static constexpr index_t group = 32;
    int bits = 8;
    index_t channels = 0;

    /// Bytes of a whole group, with what its numbers are multiples of.
    static constexpr index_t group_bytes(int bits) { return group * bits / 8 + (bits == 8 ? 4 : 8); }
    index_t groups() const { return (channels + group - 1) / group; }
    /// Floats before the multiples.
    index_t scales() const { return groups() * (bits == 8 ? 1 : 2); }
    /// Which float is the scale of a group; the least of its numbers is the next.
    index_t scale_at(index_t g) const { return bits == 8 ? g : 2 * g; }
    /// Bytes of a row, whole floats.
    index_t row_bytes() const {
        const auto size = bits == 8 ? channels : (channels + 1) / 2;
        return scales() * 4 + (size + 3) / 4 * 4;
    }
    /// Channels whose multiples lie side by side, and have one scale.
    struct run {
        index_t group;
        index_t byte; ///< of the row, where the first multiple lies
        int shift;    ///< which bit of it is the first
        index_t end;  ///< the channel after them
    };
    run run_from(index_t channel) const {
        const auto g = channel / group, first = g * group, end = std::min(first + group, channels), multiples = scales() * 4;
        if (bits == 8) return {g, multiples + channel, 0, end};
        const auto half = first + (end - first + 1) / 2, byte = multiples + first / 2 + channel;
        return channel < half ? run{g, byte - first, 0, half} : run{g, byte - half, 4, end};
    }

    /// to[c] = the numbers of a row.
    template <Scalar T>
    void read(const std::byte* row, T* to) const {
        if (bits == 8) read<8>(row, to);
        else read<4>(row, to);
    }
    /// Whether a row can be written: all its numbers are finite, and none is beyond what a scale can be.
    template <Scalar T>
    bool fits(const T* from) const {
        for (index_t g = 0; g < groups(); ++g) {
            const auto [scale, least] = steps_of(from, g);
            for (auto c = g * group; c < end_of(g); ++c)
                if (!std::isfinite(from[c])) return false;
            if (!std::isfinite(scale) || !std::isfinite(least)) return false;
        }
        return true;
    }
    /// Writes a row that fits; multiples are rounded to the nearest, of two to the even one. Numbers that are all equal are exact.
    template <Scalar T>
    void write(const T* from, std::byte* row) const {
        for (index_t g = 0; g < groups(); ++g) {
            const auto [scale, least] = steps_of(from, g);
            set_number(row, scale_at(g), scale);
            if (bits == 4) set_number(row, scale_at(g) + 1, least);
            for (auto c = g * group; c < end_of(g); ++c) {
                const auto above = static_cast<double>(from[c]) - static_cast<double>(least);
                set(row, c, scale == 0 ? 0 : std::nearbyint(above / static_cast<double>(scale)));
            }
        }
    }
    friend bool operator==(const quantised_rows&, const quantised_rows&) = default;

private:
    template <int Bits, Scalar T>
    void read(const std::byte* row, T* to) const {
        constexpr index_t size = simd::lanes<T>::size;
        for (index_t c = 0; c < channels;) {
            const auto now = run_from(c);
            const auto scale = static_cast<T>(number(row, scale_at(now.group)));
            const auto least = Bits == 8 ? T{0} : static_cast<T>(number(row, scale_at(now.group) + 1));
            const dequantised_lanes<Bits, T> numbers{scale, least};
            const auto* from = row + now.byte;
            for (; c + size <= now.end; c += size, from += size) numbers(from, now.shift).store(to + c);
            if (c == now.end) continue;
            std::array<std::byte, std::size_t{size}> rest{};
            std::copy_n(from, now.end - c, rest.data());
            numbers(rest.data(), now.shift).store_first(to + c, now.end - c);
            c = now.end;
        }
    }
    /// What the numbers of a group are multiples of, and the least of them in 4 bits, else 0.
    struct steps {
        float scale, least;
    };
    template <Scalar T>
    steps steps_of(const T* from, index_t g) const {
        const auto [low, high] = std::minmax_element(from + g * group, from + end_of(g));
        const auto a = static_cast<double>(*low), b = static_cast<double>(*high);
        if (bits == 4) return {static_cast<float>((b - a) / 15), static_cast<float>(a)};
        // 64 times a 64th is exact where 127 times a 127th is not.
        return {static_cast<float>(std::max(std::abs(a), std::abs(b)) / (a == b ? 64 : 127)), 0};
    }
    index_t end_of(index_t g) const { return std::min((g + 1) * group, channels); }
    static float number(const std::byte* row, index_t at) {
        float x;
        std::memcpy(&x, row + at * 4, 4);
        return x;
    }
    static void set_number(std::byte* row, index_t at, float x) { std::memcpy(row + at * 4, &x, 4); }
    void set(std::byte* row, index_t channel, double multiple) const {
        const auto at = run_from(channel);
        auto& byte = row[at.byte];
        if (bits == 8) {
            byte = static_cast<std::byte>(static_cast<std::int8_t>(std::clamp(multiple, -127.0, 127.0)));
        } else {
            const auto q = static_cast<unsigned>(std::clamp(multiple, 0.0, 15.0));
            byte = static_cast<std::byte>(at.shift == 0 ? q : (std::to_integer<unsigned>(byte) & 15) | q << 4);
        }
    }
};

} // namespace attn::kernel
