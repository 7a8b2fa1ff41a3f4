// A hash of the bits of results.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace attn::testing {

/// FNV-1a over the bits of numbers. All NaN are one: which of two comes out of a sum is the processor's.
class fingerprint {
public:
    template <class T>
    void add(std::span<const T> numbers) {
        using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
        for (const T x : numbers)
            hash_ = (hash_ ^ std::bit_cast<bits>(std::isnan(x) ? std::numeric_limits<T>::quiet_NaN() : x)) * 0x100000001b3u;
    }
    std::uint64_t value() const { return hash_; }

private:
    std::uint64_t hash_ = 0xcbf29ce484222325u;
};

} // namespace attn::testing
