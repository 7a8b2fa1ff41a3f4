// Rows of numbers in 8 or 4 bits, in groups of channels that have a scale each.
#pragma once

#include "../../simd/lanes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How a row of channels lies in so many bits a number: for each group of 32 channels, the last of which may have fewer, what its numbers
/// are multiples of, a float, and in 4 bits the least of them, another; then the multiples q, of all groups.
///     8 bits: x = scale q, q = -127 .. 127                4 bits: x = least + scale q, q = 0 .. 15, two of neighbouring channels in a byte
struct quantised_rows {
    static constexpr index_t group = 32;
    int bits = 8;
    index_t channels = 0;

    index_t groups() const { return (channels + group - 1) / group; }
    /// Floats before the multiples.
    index_t scales() const { return groups() * (bits == 8 ? 1 : 2); }
    /// Bytes of a row, whole floats.
    index_t row_bytes() const {
        const auto size = bits == 8 ? channels : (channels + 1) / 2;
        return scales() * 4 + (size + 3) / 4 * 4;
    }

    /// to[c] = the numbers of a row.
    template <Scalar T>
    void read(const std::byte* row, T* to) const {
        const auto* const multiples = row + scales() * 4;
        for (index_t g = 0; g < groups(); ++g) {
            const auto first = g * group, count = std::min(group, channels - first);
            std::array<T, group> numbers;
            if (bits == 8) {
                std::array<std::int8_t, group> q{};
                if (count == group) std::memcpy(q.data(), multiples + first, group); // of a size that is known: registers, no call
                else std::memcpy(q.data(), multiples + first, static_cast<std::size_t>(count));
                for (std::size_t c = 0; c < group; ++c) numbers[c] = static_cast<T>(q[c]);
            } else {
                std::array<std::uint8_t, group / 2> q{};
                if (count == group) std::memcpy(q.data(), multiples + first / 2, group / 2);
                else std::memcpy(q.data(), multiples + first / 2, static_cast<std::size_t>(count + 1) / 2);
                for (std::size_t c = 0; c < group / 2; ++c) {
                    numbers[2 * c] = static_cast<T>(q[c] & 15);
                    numbers[2 * c + 1] = static_cast<T>(q[c] >> 4);
                }
            }
            using lanes = simd::lanes<T>;
            const lanes scale = static_cast<T>(number(row, scale_at(g))),
                        least = bits == 8 ? T{0} : static_cast<T>(number(row, scale_at(g) + 1));
            index_t c = 0;
            const auto at = [&](index_t channel) {
                const auto product = scale * lanes::load(numbers.data() + channel);
                return bits == 8 ? product : product + least;
            };
            for (; c + lanes::size <= count; c += lanes::size) at(c).store(to + first + c);
            if (c < count) at(c).store_first(to + first + c, count - c);
        }
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
    /// Which float is the scale of a group.
    index_t scale_at(index_t g) const { return bits == 8 ? g : 2 * g; }
    static float number(const std::byte* row, index_t at) {
        float x;
        std::memcpy(&x, row + at * 4, 4);
        return x;
    }
    static void set_number(std::byte* row, index_t at, float x) { std::memcpy(row + at * 4, &x, 4); }
    void set(std::byte* row, index_t channel, double multiple) const {
        auto* const multiples = row + scales() * 4;
        if (bits == 8) {
            multiples[channel] = static_cast<std::byte>(static_cast<std::int8_t>(std::clamp(multiple, -127.0, 127.0)));
        } else {
            const auto q = static_cast<unsigned>(std::clamp(multiple, 0.0, 15.0));
            auto& both = multiples[channel / 2];
            both = static_cast<std::byte>(channel % 2 == 0 ? q : (std::to_integer<unsigned>(both) & 15) | q << 4);
        }
    }
};

} // namespace attn::kernel
