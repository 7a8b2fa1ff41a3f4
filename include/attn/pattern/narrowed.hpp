#pragma once

#include "schedule.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// A narrowed pattern that is asked key by key at once: that takes it less time than questions about ranges of keys.
template <class P>
concept AskedByKey = P::is_asked_by_key;

/// A narrowed pattern that lists the keys of a run that queries see: list(queries, keys, f) calls f(number of a key, mask of queries), for
/// a key perhaps more than once. That takes it less time than to be asked about each.
template <class P>
concept ListsKeys = P::lists_keys;

/// Both or either of two patterns, of which one may be known not to matter.
template <class A, class B, bool is_union>
struct narrowed_pair {
    static constexpr bool is_asked_by_key = AskedByKey<A> || AskedByKey<B>;
    static constexpr bool lists_keys = !is_union && (ListsKeys<A> || ListsKeys<B>);
    A a;
    B b;
    bool needs_a, needs_b;

    constexpr auto visible(const auto& i, const auto& j) const {
        const auto left = [&] { return as_mask(i, a.visible(i, j)); };
        const auto right = [&] { return as_mask(i, b.visible(i, j)); };
        if constexpr (std::same_as<decltype(left()), decltype(right())>) {
            if (!needs_a) return right();
            if (!needs_b) return left();
        }
        if constexpr (is_union) return left() || right();
        else return left() && right();
    }

    /// Keys that both see: those that one lists, with the other's mask.
    void list(const QueryLanes auto& i, const key_run& keys, const auto& f) const
        requires(lists_keys)
    {
        const auto list_with = [&](const auto& own, const auto& other, bool needs_other) {
            own.list(i, keys, [&](index_t number, auto seen) {
                if (!needs_other) return f(number, seen);
                f(number, seen && as_mask(i, other.visible(i, keys.first + number * keys.step)));
            });
        };
        if constexpr (ListsKeys<A>) list_with(a, b, needs_b);
        else list_with(b, a, needs_a);
    }

private:
    template <class Index, class V>
    static constexpr auto as_mask(const Index&, V value) {
        if constexpr (QueryLanes<Index> && std::same_as<V, bool>) return Index::mask_from_bits(value ? ~std::uint64_t{0} : 0);
        else return value;
    }
};

} // namespace detail

/// The pattern on one box of queries and keys, without the parts that the box decides: a residue-class tile need not divide to learn
/// that it is strided, nor a tile inside the window compare with its edges. What is left is equal to p on the box, for integers and
/// for lanes; `visible` of lanes with `mask_from_bits` is then always a mask.
constexpr auto narrowed(const Pattern auto& p, const position_range&, const position_range&) { return p; }

/// Two combined patterns on one box of queries and keys: an intersection without one that sees all of the box, a union without one that
/// sees none.
template <Pattern A, Pattern B, bool is_union>
constexpr auto narrowed(const pattern::combined<A, B, is_union>& p, const position_range& queries, const position_range& keys) {
    auto a = narrowed(p.a, queries, keys);
    auto b = narrowed(p.b, queries, keys);
    const auto is_needed = [](const visibility& seen) { return is_union ? !seen.is_none() : !seen.is_all(); };
    const bool needs_a = is_needed(p.a.visible(queries, keys)), needs_b = is_needed(p.b.visible(queries, keys)) || !needs_a;
    return detail::narrowed_pair<decltype(a), decltype(b), is_union>{a, b, needs_a, needs_b};
}

/// What hides the keys of a pattern, narrowed as the pattern is.
template <Pattern A>
constexpr auto narrowed(const pattern::inverse<A>& p, const position_range& queries, const position_range& keys) {
    auto a = narrowed(p.a, queries, keys);
    return pattern::inverse<decltype(a)>{a};
}

} // namespace attn
