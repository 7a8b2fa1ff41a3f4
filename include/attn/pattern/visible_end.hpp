// Patterns that show each query the first keys, up to a position that never falls from query to query.
#pragma once

#include "causal.hpp"
#include "prefix.hpp"
#include "lengths.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// A position after every other, such that differences of it and a position fit.
inline constexpr index_t everything = 2 * farthest_position;

/// The position before which query i sees every key, and from which on it sees none.
constexpr index_t visible_end(const dense&, index_t) { return everything; }
constexpr index_t visible_end(const causal&, index_t i) { return i + 1; }
constexpr index_t visible_end(const shorter_than& p, index_t) { return std::min(p.length, everything); }
constexpr index_t visible_end(const pattern::prefix& p, index_t i) { return std::clamp(p.length, i + 1, everything); }
template <class A, class B, bool is_union>
constexpr index_t visible_end(const pattern::combined<A, B, is_union>& p, index_t i) {
    const auto a = visible_end(p.a, i), b = visible_end(p.b, i);
    return is_union ? std::max(a, b) : std::min(a, b);
}

template <class P>
inline constexpr bool shows_beginnings = requires(const P& p, index_t i) { visible_end(p, i); };
template <class A, class B, bool is_union>
inline constexpr bool shows_beginnings<pattern::combined<A, B, is_union>> = shows_beginnings<A> && shows_beginnings<B>;

/// False if every query sees the same keys.
template <class P>
inline constexpr bool follows_queries = true;
template <>
inline constexpr bool follows_queries<dense> = false;
template <>
inline constexpr bool follows_queries<shorter_than> = false;
template <class A, class B, bool is_union>
inline constexpr bool follows_queries<pattern::combined<A, B, is_union>> = follows_queries<A> || follows_queries<B>;

} // namespace detail

/// dense, causal, lengths, prefix, and what & and | make of them: what can be attended to by a running sum over the keys.
template <class P>
concept BeginningsPattern = Pattern<P> && detail::shows_beginnings<decltype(at(std::declval<const P&>(), index_t{}, index_t{}))>;

} // namespace attn
