// A view of somebody's memory as a tensor (batch, heads, tokens, channels), with any strides.
#pragma once

#include "shape.hpp"
#include "storage.hpp"

#include <cstdlib>
#include <limits>
#include <span>
#include <type_traits>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Distances in elements between neighbours along each dimension. Zero repeats an element (broadcast), negative walks back.
struct strides {
    index_t batch = 0;
    index_t heads = 0;
    index_t tokens = 0;
    index_t channels = 1;

    /// Those of tokens and channels exchanged.
    constexpr strides transposed() const noexcept { return {batch, heads, channels, tokens}; }
    friend constexpr bool operator==(const strides&, const strides&) = default;
};

/// Rows first .. first + count - 1 of a sequence, or so many of another dimension, counted from its first one.
struct row_range {
    index_t first = 0, count = 0;

    /// One past the last row.
    constexpr index_t end() const noexcept { return first + count; }
    friend constexpr bool operator==(const row_range&, const row_range&) = default;
};

/// A part of a tensor: a range of each dimension, all of it where none is given. {.tokens = {first, count}} are some tokens of every batch
/// entry and head.
struct tensor_part {
    /// All of a dimension.
    static constexpr row_range all{0, std::numeric_limits<index_t>::max()};

    row_range batch = all, heads = all, tokens = all, channels = all;

    /// The extents of the part of such a tensor.
    constexpr shape shape_of(const shape& s) const noexcept {
        const auto count = [](const row_range& range, index_t extent) { return range == all ? extent : range.count; };
        return {count(batch, s.batch), count(heads, s.heads), count(tokens, s.tokens), count(channels, s.channels)};
    }
    /// How many elements its first one lies behind that of the tensor.
    constexpr index_t offset(const strides& s) const noexcept {
        return batch.first * s.batch + heads.first * s.heads + tokens.first * s.tokens + channels.first * s.channels;
    }
};

namespace detail {

/// What looks like an mdspan over plain memory, std's or another: 2, 3 or 4 extents.
template <class M>
concept MdspanLike = requires(const M& m, std::size_t r) {
    typename M::element_type;
    { m.data_handle() } -> std::same_as<typename M::element_type*>;
    { m.extent(r) } -> std::convertible_to<index_t>;
    { m.stride(r) } -> std::convertible_to<index_t>;
    requires M::rank() >= 2 && M::rank() <= 4;
};

} // namespace detail

template <class T>
struct stored_rows;

/// Rows of channels: row r begins r row_stride elements behind `data`. T is const where they are only read.
template <class T>
struct row_block {
    T* data;
    index_t row_stride, channel_stride;

    /// Where an element lies.
    constexpr T* address(index_t row, index_t channel = 0) const { return data + row * row_stride + channel * channel_stride; }
    constexpr T& operator()(index_t row, index_t channel) const { return *address(row, channel); }
    /// The rows from one on, without the channels before one; of none, none.
    constexpr row_block from(index_t row, index_t channel = 0) const {
        return {data ? address(row, channel) : nullptr, row_stride, channel_stride};
    }
    /// Every step-th row.
    constexpr row_block every(index_t step) const { return {data, row_stride * step, channel_stride}; }
    /// The channels as rows.
    constexpr row_block transposed() const { return {data, channel_stride, row_stride}; }
    /// Whether the rows are stored in 16 bits, as stored_rows may be.
    static constexpr bool is_narrow() { return false; }
    /// The rows, of numbers that are stored in T.
    constexpr row_block numbers() const { return *this; }

    constexpr operator row_block<const T>() const
        requires(!std::is_const_v<T>)
    {
        return {data, row_stride, channel_stride};
    }
    /// The rows as those whose format is known as the program runs.
    template <class U>
        requires(std::same_as<U, T> || std::same_as<U, const T>)
    constexpr operator stored_rows<U>() const {
        return {reinterpret_cast<typename stored_rows<U>::byte*>(data), narrow_format::none, row_stride, channel_stride};
    }
    friend constexpr bool operator==(const row_block&, const row_block&) = default;
};

/// A non-owning tensor (batch, heads, tokens, channels). A view of T converts to a view of const T. So does an mdspan of 4 extents, of 3
/// (heads, tokens, channels), or of 2 (tokens, channels).
template <class T>
class tensor_view {
public:
    using element_type = T;

    constexpr tensor_view() = default;
    /// A view of memory that somebody else owns.
    constexpr tensor_view(T* data, const attn::shape& shape, const attn::strides& strides) noexcept
        : data_(data), shape_(shape), strides_(strides) {}
    /// A view, to be read only, of the elements of another view.
    template <class U>
        requires(std::is_const_v<T> && std::same_as<U, std::remove_const_t<T>>)
    constexpr tensor_view(const tensor_view<U>& other) noexcept : data_(other.data()), shape_(other.shape()), strides_(other.strides()) {}

    /// A view of an mdspan of T, or of what becomes const T.
    template <detail::MdspanLike M>
        requires std::convertible_to<typename M::element_type (*)[], T (*)[]>
    constexpr tensor_view(const M& m)
        : data_(m.data_handle()), shape_{extent_of(m, 4), extent_of(m, 3), extent_of(m, 2), extent_of(m, 1)},
          strides_{stride_of(m, 4), stride_of(m, 3), stride_of(m, 2), stride_of(m, 1)} {}

    /// Where element (0, 0, 0, 0) lies.
    constexpr T* data() const noexcept { return data_; }
    /// The extents.
    constexpr const attn::shape& shape() const noexcept { return shape_; }
    /// The distances between neighbours.
    constexpr const attn::strides& strides() const noexcept { return strides_; }
    /// Bytes of an element.
    static constexpr index_t element_bytes() noexcept { return sizeof(T); }

    /// As stored_view has it: elements of T are what they are.
    static constexpr bool is_narrow() noexcept { return false; }

    /// Address of channel 0 of one token.
    constexpr T* row(index_t batch, index_t head, index_t token) const noexcept {
        return data_ + batch * strides_.batch + head * strides_.heads + token * strides_.tokens;
    }
    constexpr T& operator()(index_t batch, index_t head, index_t token, index_t channel) const noexcept {
        return row(batch, head, token)[channel * strides_.channels];
    }
    /// The rows of one batch entry and head, from one on.
    constexpr row_block<T> rows(index_t batch, index_t head, index_t first = 0) const noexcept {
        return {row(batch, head, first), strides_.tokens, strides_.channels};
    }
    /// A view of a part of the tensor, where it lies: slice({.heads = {h, 1}, .tokens = {i, n}}). Nothing is checked: what lies outside may
    /// be named, and must not be read. Of a view without memory, one without memory.
    constexpr tensor_view slice(const tensor_part& part) const noexcept {
        return {data_ ? data_ + part.offset(strides_) : nullptr, part.shape_of(shape_), strides_};
    }
    /// A view of the same elements whose tokens are the channels of this one, and whose channels are its tokens.
    constexpr tensor_view transposed() const noexcept { return {data_, shape_.transposed(), strides_.transposed()}; }

private:
    /// The extent of a dimension of an mdspan, counted from the last, which is 1. Those that an mdspan lacks have one element.
    static constexpr index_t extent_of(const auto& m, std::size_t from_last) {
        return from_last > m.rank() ? 1 : static_cast<index_t>(m.extent(m.rank() - from_last));
    }
    static constexpr index_t stride_of(const auto& m, std::size_t from_last) {
        return from_last > m.rank() ? 0 : static_cast<index_t>(m.stride(m.rank() - from_last));
    }

    T* data_ = nullptr;
    attn::shape shape_ = detail::no_shape;
    attn::strides strides_;
};

/// Deduces a view of the numbers of an mdspan.
template <detail::MdspanLike M>
tensor_view(const M&) -> tensor_view<typename M::element_type>;

/// Views contiguous memory laid out as [batch][heads][tokens][channels].
template <class T>
constexpr tensor_view<T> head_major(T* data, const shape& s) noexcept {
    using detail::product;
    return {data, s, {product(s.heads, s.tokens, s.channels), product(s.tokens, s.channels), s.channels, 1}};
}

/// Views contiguous memory laid out as [batch][tokens][heads][channels], what a linear projection leaves behind.
template <class T>
constexpr tensor_view<T> token_major(T* data, const shape& s) noexcept {
    using detail::product;
    return {data, s, {product(s.tokens, s.heads, s.channels), s.channels, product(s.heads, s.channels), 1}};
}

namespace detail {

/// Numbers side by side as one row.
template <class T>
constexpr tensor_view<T> as_row(std::span<T> numbers) noexcept {
    return head_major(numbers.data(), {.tokens = 1, .channels = std::ssize(numbers)});
}

/// A tensor_view, or a stored_view.
template <class V>
concept AnyView = requires(const V& view) {
    view.data();
    { view.shape() } -> std::same_as<const shape&>;
    { view.strides() } -> std::same_as<const strides&>;
    { view.element_bytes() } -> std::same_as<index_t>;
};

/// Whether an argument of some tokens is given, where it need not be: then it has a shape, though without tokens perhaps no memory.
bool is_given(const AnyView auto& view) { return view.shape() != no_shape; }

/// Writes 0 to all numbers of a view; nothing to one without memory.
template <class T>
void fill_zero(const tensor_view<T>& view) {
    if (view.data()) for_each_number(view.shape(), [&](index_t b, index_t h, index_t i, index_t c) { view(b, h, i, c) = T{0}; });
}

/// Why no kernel can read such a view: no tensor has its shape, it has elements but no memory, or strides beyond what can be addressed.
/// Empty if one can.
inline std::string problem_of(const void* data, index_t size, const shape& n, const strides& s) {
    if (auto problem = problem_of(n, static_cast<std::size_t>(size)); !problem.empty() || n.size() == 0) return problem;
    if (!data) return joined({"has shape ", to_string(n), " but no memory (a null pointer)"});
    const auto reaches_far = [size](index_t stride, index_t extent) {
        if (extent <= 1) return false;
        return stride < -max_bytes || stride > max_bytes || product(std::abs(stride), extent - 1, size) > max_bytes;
    };
    if (reaches_far(s.batch, n.batch) || reaches_far(s.heads, n.heads) || reaches_far(s.tokens, n.tokens) ||
        reaches_far(s.channels, n.channels))
        return joined({"of shape ", to_string(n), " has strides that reach beyond ", max_bytes_text});
    return {};
}
/// Why no kernel can read the view.
std::string problem_of(const AnyView auto& view) { return problem_of(view.data(), view.element_bytes(), view.shape(), view.strides()); }

/// Throws shape_error if no kernel can read, or write, the view.
[[gnu::noinline]] inline void check_view(std::string_view operation, std::string_view argument, const void* data, index_t size,
                                         const shape& n, const strides& s) {
    if (const auto problem = problem_of(data, size, n, s); !problem.empty()) detail::raise(shape_error(operation, argument, problem));
}
void check_view(std::string_view operation, std::string_view argument, const AnyView auto& view) {
    check_view(operation, argument, view.data(), view.element_bytes(), view.shape(), view.strides());
}
/// Throws shape_error unless a view without memory, or of `expected`, is given.
void check_optional(std::string_view operation, std::string_view argument, const AnyView auto& view, const shape& expected) {
    if (!view.data()) return;
    check_view(operation, argument, view);
    if (view.shape() != expected)
        detail::raise(shape_error(operation, argument, "has shape ", view.shape(), ", but ", expected, " is needed"));
}
/// The same of what is read, where a null pointer to elements is a mistake.
void check_optional_input(std::string_view operation, std::string_view argument, const AnyView auto& view, const shape& expected) {
    check_view(operation, argument, view);
    check_optional(operation, argument, view, expected);
}

} // namespace detail

} // namespace attn
