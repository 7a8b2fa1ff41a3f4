// Rows of channels that are computed with in one type, and may be stored in a narrower one.
#pragma once

#include "storage.hpp"
#include "tensor.hpp"

#include <cstddef>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The number that lies at an address, stored in `format`.
template <class T>
T loaded(const std::byte* at, narrow_format format) {
    if constexpr (std::same_as<T, float>) {
        if (format == narrow_format::bfloat16) return *reinterpret_cast<const narrow_number<narrow_format::bfloat16>*>(at);
        if (format == narrow_format::half) return *reinterpret_cast<const narrow_number<narrow_format::half>*>(at);
    }
    return *reinterpret_cast<const T*>(at);
}
/// Stores a number at an address, rounded to `format`.
template <class T>
void stored(T number, std::byte* at, narrow_format format) {
    if constexpr (std::same_as<T, float>) {
        if (format == narrow_format::bfloat16) return void(*reinterpret_cast<narrow_number<narrow_format::bfloat16>*>(at) = number);
        if (format == narrow_format::half) return void(*reinterpret_cast<narrow_number<narrow_format::half>*>(at) = number);
    }
    *reinterpret_cast<T*>(at) = number;
}

/// One number of a view: what assigns to it rounds.
template <class T>
class stored_number {
public:
    constexpr stored_number(std::byte* at, narrow_format format) : at_(at), format_(format) {}
    operator T() const { return loaded<T>(at_, format_); }
    const stored_number& operator=(T number) const {
        stored(number, at_, format_);
        return *this;
    }
    const stored_number& operator=(const stored_number& other) const { return *this = static_cast<T>(other); }
    const stored_number& operator+=(T number) const { return *this = *this + number; }

private:
    std::byte* at_;
    narrow_format format_;
};

} // namespace detail

/// Rows of channels that are computed with in T, as they are stored: what a row_block is to a tensor_view.
template <class T>
struct stored_rows {
    using number = std::remove_const_t<T>;
    using byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;

    byte* data;
    narrow_format format;
    index_t row_stride, channel_stride;

    /// Whether the rows are stored in 16 bits.
    constexpr bool is_narrow() const { return format != narrow_format::none; }
    /// Bytes of an element.
    constexpr index_t element() const { return is_narrow() ? 2 : static_cast<index_t>(sizeof(T)); }
    /// Where a number lies.
    constexpr byte* address(index_t row, index_t channel = 0) const {
        return data + (row * row_stride + channel * channel_stride) * element();
    }
    number operator()(index_t row, index_t channel) const { return detail::loaded<number>(address(row, channel), format); }
    /// Stores a number, rounded to what is stored.
    void set(index_t row, index_t channel, number x) const { detail::stored<number>(x, address(row, channel), format); }
    /// The rows from one on, without the channels before one.
    constexpr stored_rows from(index_t row, index_t channel = 0) const {
        return {address(row, channel), format, row_stride, channel_stride};
    }
    /// Every step-th row.
    constexpr stored_rows every(index_t step) const { return {data, format, row_stride * step, channel_stride}; }
    /// The channels as rows.
    constexpr stored_rows transposed() const { return {data, format, channel_stride, row_stride}; }
    /// The rows as those of E, which is what they are stored as.
    template <class E>
    row_block<E> as() const {
        return {reinterpret_cast<E*>(data), row_stride, channel_stride};
    }
    /// The rows of numbers that are stored in T, which is checked before.
    row_block<T> numbers() const { return as<T>(); }
    friend constexpr bool operator==(const stored_rows&, const stored_rows&) = default;
};

} // namespace attn
