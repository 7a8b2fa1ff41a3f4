// The numbers that tensors are stored in: those attn computes with, and 16-bit ones.
#pragma once

#include "scalar.hpp"

#include <bit>
#include <cstdint>
#include <type_traits>
#if __has_include(<stdfloat>)
#include <stdfloat>
#endif

namespace Eigen {
struct bfloat16;
struct half;
} // namespace Eigen

namespace attn::inline ATTN_INSTRUCTION_SET {

/// How 16 bits make a number: bfloat16 has the upper half of a float, 8 bits of exponent and 7 of fraction; half, IEEE 754's binary16, has
/// 5 and 10.
enum class narrow_format { none, bfloat16, half };

/// The format of a 16-bit type: specialise it for one of your own, which is its bits.
template <class T>
inline constexpr narrow_format narrow_format_of = narrow_format::none;
template <>
inline constexpr narrow_format narrow_format_of<Eigen::bfloat16> = narrow_format::bfloat16;
template <>
inline constexpr narrow_format narrow_format_of<Eigen::half> = narrow_format::half;
#if defined(__STDCPP_BFLOAT16_T__)
template <>
inline constexpr narrow_format narrow_format_of<std::bfloat16_t> = narrow_format::bfloat16;
#endif
#if defined(__STDCPP_FLOAT16_T__)
template <>
inline constexpr narrow_format narrow_format_of<std::float16_t> = narrow_format::half;
#endif

/// A 16-bit type that tensors may be stored in: Eigen::bfloat16, Eigen::half, std::bfloat16_t, std::float16_t, or one that says its format.
/// It is computed in float.
template <class T>
concept Narrow = narrow_format_of<std::remove_cv_t<T>> != narrow_format::none;

/// An element type of tensors that operators read and write.
template <class T>
concept Storage = Scalar<T> || Narrow<T>;

namespace detail {

/// Stands for any 16-bit type where none is named.
enum class sixteen_bits : std::uint16_t {};

/// The number of 16 bits, exact: subnormals and infinities stay what they are, NaN is NaN, a quiet one of half.
template <narrow_format format>
constexpr float widened(std::uint16_t bits) {
    if constexpr (format == narrow_format::bfloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    else {
        const auto sign = static_cast<std::uint32_t>(bits & 0x8000) << 16, rest = static_cast<std::uint32_t>(bits & 0x7fff) << 13;
        // A product rebiases exponents, exactly, and makes normal numbers of subnormal ones; that of infinity and NaN becomes 255.
        auto number = std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112F);
        if (rest >= 0x0f800000) number |= 0x7f800000;
        if (rest > 0x0f800000) number |= 0x00400000;
        return std::bit_cast<float>(number | sign);
    }
}

/// The bits of the nearest number, of two the even one; from half a step beyond the largest on infinity; of NaN a quiet one with its upper
/// bits.
template <narrow_format format>
constexpr std::uint16_t narrowed(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    std::uint32_t rounded;
    if constexpr (format == narrow_format::bfloat16) {
        if (magnitude > 0x7f800000) rounded = magnitude >> 16 | 0x0040;
        else rounded = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    } else {
        if (magnitude > 0x7f800000) rounded = (magnitude >> 13 & 0x3ff) | 0x7e00;
        else if (magnitude >= 0x477ff000) rounded = 0x7c00; // 65520, halfway from the largest number to 2^16
        else if (magnitude >= 0x38800000) rounded = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        else
            rounded = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) -
                      0x3f000000; // the last bit of 0.5 is 2^-24, as a subnormal's
    }
    return static_cast<std::uint16_t>(sign | rounded);
}

/// A 16-bit number as it is stored, which becomes a float as it is read, and is rounded to as it is written.
template <narrow_format format>
struct [[gnu::may_alias]] narrow_number {
    std::uint16_t bits;

    constexpr operator float() const { return widened<format>(bits); }
    constexpr narrow_number& operator=(float x) {
        bits = narrowed<format>(x);
        return *this;
    }
};

} // namespace detail

template <>
inline constexpr narrow_format narrow_format_of<detail::sixteen_bits> = narrow_format::bfloat16;
template <narrow_format format>
inline constexpr narrow_format narrow_format_of<detail::narrow_number<format>> = format;

/// What a storage type is computed in: float for a 16-bit one, else itself.
template <Storage S>
using computed_in = std::conditional_t<Narrow<S>, float, std::remove_cv_t<S>>;

} // namespace attn
