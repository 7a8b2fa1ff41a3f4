// Random numbers of one problem, the same on every machine: the standard's generators are, its distributions are not.
#pragma once

#include <attn/core/tensor.hpp>

#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace attn::fuzz {

/// Numbers drawn from the seed of a run and the number of a problem, so that any problem can be had alone. (splitmix64)
class draw {
public:
    draw(std::uint64_t seed, std::uint64_t problem) : state_(seed * 0x9e3779b97f4a7c15u + problem) { state_ = bits() ^ problem; }

    std::uint64_t bits() {
        auto x = state_ += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }
    /// first <= number <= last.
    index_t number(index_t first, index_t last) {
        return first + static_cast<index_t>(bits() % static_cast<std::uint64_t>(last - first + 1));
    }
    bool one_in(index_t n) { return number(1, n) == 1; }
    /// In [low, high).
    double real(double low, double high) { return low + (high - low) * 0x1p-53 * static_cast<double>(bits() >> 11); }
    template <class V, std::size_t Count>
    V one_of(const V (&values)[Count]) {
        return values[static_cast<std::size_t>(number(0, Count - 1))];
    }
    /// A size of 0 .. limit. Small ones dominate; many lie at the edges of registers, of panels of 3 of them, and of tiles of 128 keys.
    index_t size(index_t limit) {
        static constexpr index_t edges[] = {8, 16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384, 512, 768, 1024, 2048};
        const auto kind = number(0, 9);
        const auto any = kind < 4   ? number(0, 20)
                         : kind < 8 ? one_of(edges) * number(1, 2) / 2 + number(-1, 2)
                         : kind < 9 ? number(0, 140)
                                    : number(0, limit);
        return any <= limit ? any : number(0, limit);
    }

private:
    std::uint64_t state_;
};

/// A tensor whose numbers are what f() gives.
template <Scalar T, class F>
tensor<T> filled(const shape& s, F&& f) {
    tensor<T> t(s);
    std::generate_n(t.data(), s.size(), [&] { return static_cast<T>(f()); });
    return t;
}

/// Texts, numbers and shapes as one text.
std::string joined(const auto&... pieces) {
    std::string text;
    const auto append = [&](const auto& piece) {
        using std::to_string;
        if constexpr (std::convertible_to<decltype(piece), std::string_view>) text += piece;
        else text += to_string(piece);
    };
    (append(pieces), ...);
    return text;
}

} // namespace attn::fuzz
