// What caches store numbers in.
#pragma once

#include "../core/borrowed.hpp"
#include "../kernel/attend/hadamard.hpp"
#include "../kernel/attend/pages.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What the numbers of a cache are stored in: as they are computed with; in 16 bits, where that is in float; or in 8 or 4 bits, in groups
/// of 32 channels of a head (the last may have fewer), each token by itself:
///     int8    x = scale q,          q = -127 .. 127,  scale = largest |x| / 127
///     int4    x = least + scale q,  q = 0 .. 15,      scale = (largest - least) / 15
/// scale and least are floats, q is rounded to the nearest, of two to the even one; groups of equal floats are exact. So what a token
/// becomes depends on nothing but the token.
enum class cache_format { full, bfloat16, half, int8, int4 };

namespace detail {

/// How a row of channels is stored.
inline kernel::row_format row_format_of(cache_format format, index_t channels) {
    switch (format) {
    case cache_format::bfloat16:
        return {channels, narrow_format::bfloat16};
    case cache_format::half:
        return {channels, narrow_format::half};
    case cache_format::int8:
        return {channels, narrow_format::none, 8};
    case cache_format::int4:
        return {channels, narrow_format::none, 4};
    default:
        return {channels};
    }
}

/// Rows of a tensor, turned by the Hadamard matrix.
template <Scalar T>
void rotate_rows(const stored_view<const T>& from, const tensor_view<T>& to) {
    const auto channels = from.shape().channels;
    for_each_row(from.shape(), [&](index_t b, index_t h, index_t i) {
        kernel::copy_rows<T>(from.rows(b, h, i), 1, channels, to.row(b, h, i), channels);
        kernel::rotate_hadamard(to.row(b, h, i), channels);
    });
}

/// Throws argument_error unless a format is one of fewer bits than 16, and there is so much memory for a row of numbers as it needs.
inline kernel::quantised_rows check_quantised(std::string_view operation, cache_format format, std::size_t numbers, std::size_t bytes) {
    const auto row = row_format_of(format, static_cast<index_t>(numbers));
    if (!row.is_quantised()) detail::raise(argument_error(operation, "format", "is neither int8 nor int4"));
    if (const auto needed = row.quantised().row_bytes(); static_cast<index_t>(bytes) < needed)
        detail::raise(argument_error(operation, "bytes", "are ", bytes, ", but ", numbers, " numbers need ", needed));
    return row.quantised();
}

} // namespace detail

/// Bytes that a row of so many channels takes in int8 or int4.
inline std::size_t quantised_bytes(cache_format format, index_t channels) {
    if (channels < 0) detail::raise(argument_error("quantised_bytes", "channels", "are ", channels));
    return static_cast<std::size_t>(
        detail::check_quantised("quantised_bytes", format, static_cast<std::size_t>(channels), std::numeric_limits<std::size_t>::max() / 2)
            .row_bytes());
}
/// Quantises a row of numbers, int8 or int4, to quantised_bytes of memory: see cache_format. Throws argument_error if there is less, or a
/// number is not finite, or too large.
template <Scalar T>
void quantise(cache_format format, std::span<const T> numbers, std::span<std::byte> bytes) {
    const auto row = detail::check_quantised("quantise", format, numbers.size(), bytes.size());
    if (!row.fits(numbers.data())) detail::raise(argument_error("quantise", "numbers", "are not finite, or too large to be quantised"));
    row.write(numbers.data(), bytes.data());
}
/// The numbers of a quantised row. Throws argument_error if there are fewer bytes than they take.
template <Scalar T>
void dequantise(cache_format format, std::span<const std::byte> bytes, std::span<T> numbers) {
    detail::check_quantised("dequantise", format, numbers.size(), bytes.size()).read(bytes.data(), numbers.data());
}

/// Turns a row of d numbers by the Hadamard matrix of b rows, divided by sqrt(b), in blocks of b, the largest power of two that divides d:
/// what a cache that rotates keys does to keys and queries. Twice, it is the row again, to rounding.
template <Scalar T>
void rotate_hadamard(std::span<T> row) {
    if (!row.empty()) kernel::rotate_hadamard(row.data(), static_cast<index_t>(row.size()));
}

} // namespace attn
