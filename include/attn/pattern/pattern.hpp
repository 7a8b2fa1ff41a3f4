// Patterns: which keys a query may attend to, and how they combine.
#pragma once

#include "../core/output_memory.hpp"
#include "../core/position.hpp"
#include "pattern_context.hpp"
#include "position_range.hpp"

#include <cstdint>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <class P>
concept HasAt = requires(const P& p, index_t i) { p.at(i, i); };

template <class P>
concept HasVisible = requires(const P& p, index_t i) { p.visible(i, i); };

template <class P>
concept HasStep = requires(const P& p) {
    { p.step() } -> std::convertible_to<index_t>;
};

/// Longer steps are no promise: a tile of them would hold one query, and the queries that pad it out would lie beyond all positions.
inline constexpr index_t longest_step = farthest_position >> 6;

/// i = j modulo two steps is i = j modulo their least common multiple. One that does not fit an index leaves the larger promise.
constexpr index_t common_multiple(index_t a, index_t b) {
    const auto factor = a / std::gcd(a, b);
    return factor > std::numeric_limits<index_t>::max() / b ? std::max(a, b) : factor * b;
}

} // namespace detail

/// The pattern that is left for one batch entry and head: `p.at(batch, head)`, or p itself if it is the same everywhere.
template <class P>
    requires(detail::HasAt<P> || detail::HasVisible<P>)
constexpr auto at(const P& p, index_t batch, index_t head) {
    if constexpr (detail::HasAt<P>) return p.at(batch, head);
    else return p;
}

/// True if all heads of a batch entry have the same pattern, for all that its type and its promise tell.
template <class P>
constexpr bool heads_alike(const P& p) {
    if constexpr (requires { p.heads_alike(); }) return p.heads_alike();
    else return !detail::HasAt<P>;
}

/// How many neighbouring queries see about the same keys, counted from position 0: as many as there are, if a pattern does not say.
template <class P>
constexpr index_t queries_alike(const P& p) {
    if constexpr (requires { p.queries_alike(); }) return p.queries_alike();
    else return farthest_position;
}

/// Whether a pattern or a score function compares the positions of queries with those of keys: so is each that does not say otherwise.
template <class P>
inline constexpr bool compares_positions = true;
/// What it says otherwise.
template <class P>
    requires requires { P::compares_positions; }
inline constexpr bool compares_positions<P> = P::compares_positions;

/// A value with one generic member `visible(i, j)` on absolute positions of a query and a key. The same text is evaluated on
/// integers, on ranges, and on lanes of queries with one integer key. Optional members:
///   at(batch, head)   the pattern for one batch entry and head (`visible` may then be that pattern's only)
///   heads_alike()     a promise beside `at`: no head's pattern differs from another's, so that what is found for one serves all
///   queries_alike()   a hint: so many neighbouring queries see about the same keys, and beyond them perhaps others
///   step()            a promise: a visible pair has i = j modulo step() (at least 1)
///   compares_positions  a static constant, false as a promise: it does not matter how queries stand beside keys, for i is not looked at,
///                     or is the row of a table; without it a call whose n is not m must give positions
///   check(context)    throws, by context.refuse, if the parameters do not fit what the pattern is used on
///   check_apart(out)  throws, by out.require_apart, if an output overlaps memory that the pattern refers to: see output_memory
/// Patterns are copied freely: they hold numbers, or handles of shared tables.
template <class P>
concept Pattern = requires(const P& p, index_t i, position_range r) {
    { attn::at(p, i, i).visible(i, i) } -> std::convertible_to<bool>;
    { attn::at(p, i, i).visible(r, r) } -> std::convertible_to<visibility>;
};

namespace detail {

/// True, or the program is not compiled, and one sentence says why.
template <class P>
consteval bool require_pattern() {
    constexpr bool is_pattern = Pattern<P>;
    static_assert(is_pattern, "attn: a pattern is one of attn's, or a function of (i, j) in attn::pattern::predicate");
    return true;
}

} // namespace detail

/// Lanes of query positions as patterns with a memory see them: lane l < count is at position first + l * step.
template <class Index>
concept QueryLanes = requires(const Index& i) {
    { i.first } -> std::convertible_to<index_t>;
    { i.step } -> std::convertible_to<index_t>;
    { i.count } -> std::convertible_to<int>;
    Index::size;
    Index::mask_from_bits(std::uint64_t{});
};

/// step() of a pattern, 1 if it promises nothing.
template <Pattern P>
constexpr index_t step_of(const P& p) {
    if constexpr (detail::HasStep<P>) return p.step() <= detail::longest_step ? p.step() : 1;
    else return 1;
}

/// Throws argument_error if a parameter of the pattern, or of one that it is made of, is wrong or does not fit the context, or if it
/// compares positions that nobody gave.
template <Pattern P>
void check(const P& p, const pattern_context& context) {
    if constexpr (requires { p.check(context); }) p.check(context);
    if constexpr (compares_positions<P>) context.require_positions("pattern");
}

/// The patterns, and what & | ! make of them. Of `attn` too are dense, causal, segments and the compositions that papers name.
namespace pattern {

/// Dense: every key.
struct dense {
    static constexpr bool compares_positions = false;

    constexpr bool visible(auto, auto) const { return true; }
};

/// What two patterns both show, or what one of them shows.
template <class A, class B, bool is_union>
struct combined {
    static constexpr bool compares_positions = attn::compares_positions<A> || attn::compares_positions<B>;
    A a;
    B b;

    constexpr auto visible(const auto& i, const auto& j) const {
        if constexpr (is_union) return a.visible(i, j) || b.visible(i, j);
        else return a.visible(i, j) && b.visible(i, j);
    }
    constexpr auto at(index_t batch, index_t head) const
        requires(detail::HasAt<A> || detail::HasAt<B>)
    {
        auto left = attn::at(a, batch, head);
        auto right = attn::at(b, batch, head);
        return combined<decltype(left), decltype(right), is_union>{left, right};
    }
    constexpr bool heads_alike() const { return attn::heads_alike(a) && attn::heads_alike(b); }
    constexpr index_t queries_alike() const { return std::min(attn::queries_alike(a), attn::queries_alike(b)); }
    constexpr index_t step() const
        requires(is_union ? detail::HasStep<A> && detail::HasStep<B> : detail::HasStep<A> || detail::HasStep<B>)
    {
        return is_union ? detail::common_step(step_of(a), step_of(b)) : detail::common_multiple(step_of(a), step_of(b));
    }
    void check(const pattern_context& context) const {
        attn::check(a, context);
        attn::check(b, context);
    }
    void check_apart(const output_memory& out) const {
        attn::check_apart(a, out);
        attn::check_apart(b, out);
    }
};

/// a & b: visible to both.
template <class A, class B>
using both = combined<A, B, false>;
/// a | b: visible to one of them or to both.
template <class A, class B>
using either = combined<A, B, true>;

/// !a: hidden by a.
template <class A>
struct inverse {
    static constexpr bool compares_positions = attn::compares_positions<A>;
    A a;

    constexpr auto visible(const auto& i, const auto& j) const { return !a.visible(i, j); }
    constexpr auto at(index_t batch, index_t head) const
        requires(detail::HasAt<A>)
    {
        auto left = attn::at(a, batch, head);
        return inverse<decltype(left)>{left};
    }
    constexpr bool heads_alike() const { return attn::heads_alike(a); }
    void check(const pattern_context& context) const { attn::check(a, context); }
    void check_apart(const output_memory& out) const { attn::check_apart(a, out); }
};

/// Keys that both patterns show.
template <Pattern A, Pattern B>
constexpr both<A, B> operator&(const A& a, const B& b) {
    return {a, b};
}

/// Keys that one of the patterns shows, or both.
template <Pattern A, Pattern B>
constexpr either<A, B> operator|(const A& a, const B& b) {
    return {a, b};
}

/// Keys that the pattern hides.
template <Pattern A>
constexpr inverse<A> operator!(const A& a) {
    return {a};
}

} // namespace pattern

using pattern::dense;
using pattern::operator&;
using pattern::operator|;
using pattern::operator!;

} // namespace attn
