// Numbers that somebody else keeps.
#pragma once

#include "instruction_set.hpp"

#include <concepts>
#include <iterator>
#include <span> // and std::ranges::enable_view, enable_borrowed_range, which it specialises: <ranges> takes long to compile
#include <type_traits>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// A range that owns its elements and is about to go, such as std::vector{1, 2, 3}.
template <class R>
concept Temporary = requires(R& range) { std::data(range); } && !std::is_lvalue_reference_v<R> &&
                    !std::ranges::enable_borrowed_range<std::remove_cvref_t<R>>;

/// What a vector, an array, a span or anything like them holds.
template <class R>
using element_t = std::remove_cvref_t<decltype(*std::data(std::declval<const R&>()))>;

} // namespace detail

/// A std::span of what an operator refers to: of T from a vector, an array, a span or anything like them. A temporary that owns its
/// elements would be gone before the operator reads them, so it is refused when the program is compiled: name the numbers first.
template <class T>
class borrowed : public std::span<T> {
public:
    constexpr borrowed() = default;
    /// Refers to the numbers of a vector, an array, a span or anything like them.
    template <class R>
        requires(!std::same_as<std::remove_cvref_t<R>, borrowed> && std::convertible_to<R, std::span<T>> && !detail::Temporary<R>)
    constexpr borrowed(R&& numbers) : std::span<T>(std::forward<R>(numbers)) {}
    /// Refers to `count` numbers that lie at `numbers`.
    template <class U> // deduced, so that the 0 of {0, 1} is no pointer
        requires std::convertible_to<U*, T*>
    constexpr borrowed(U* numbers, std::size_t count) : std::span<T>(numbers, count) {}
    template <detail::Temporary R>
    borrowed(R&& temporary) = delete;
};

} // namespace attn

/// @cond
template <class T>
inline constexpr bool std::ranges::enable_borrowed_range<attn::borrowed<T>> = true;
template <class T>
inline constexpr bool std::ranges::enable_view<attn::borrowed<T>> = true;
/// @endcond
