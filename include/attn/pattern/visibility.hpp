// What is known of many pairs at once: the truth values of the third arithmetic.
#pragma once

#include "../core/scalar.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET {

class visibility;

namespace detail {

/// What makes two visibilities, or one and a bool, with A.
template <class B, class A>
concept VisibilityWith = (std::same_as<A, visibility> && (std::same_as<B, visibility> || std::same_as<B, bool>)) ||
                         (std::same_as<A, bool> && std::same_as<B, visibility>);

// A base, so above its users. Its conversion is no template, so that built-in operators, subscripts and standard functions all
// find it, and is a member of one, so that it fails only where it is used.
template <class Self, class Value>
struct no_value {
    operator Value() const {
        static_assert(!std::same_as<Self, Self>,
                      "attn: this predicate cannot be evaluated on ranges of positions: use + - * / % and comparisons of i and j, "
                      "joined by && || !, without table[j], if, ?: or conversions; "
                      "attn::pattern::tiles(mask, n, m) makes a pattern of an opaque mask, attn::pattern::selected of a table of blocks");
        return {};
    }
};

} // namespace detail

/// What is known of a box of (query, key) pairs: none is visible, all are, or anything may be. `&&`, `||`, `!`, `==` and `!=` are
/// three-valued, also with `bool`: all means true of every pair, none false of every pair.
class visibility : public detail::no_value<visibility, bool> {
public:
    static const visibility none, some, all;

    /// The visibility of pairs that are known to be all visible, or not one.
    constexpr visibility(std::same_as<bool> auto known) : visibility(known, !known) {}
    /// All if always, none if never, else some.
    constexpr visibility(bool always, bool never) : level_(1 + int{always} - int{never}) {}

    /// Whether no pair is visible.
    constexpr bool is_none() const noexcept { return level_ == 0; }
    /// Whether all pairs are visible.
    constexpr bool is_all() const noexcept { return level_ == 2; }

    friend constexpr visibility operator!(visibility a) { return visibility(2 - a.level_); }
    /// The less visible of two: a && b.
    static constexpr visibility least(visibility a, visibility b) { return visibility(std::min(a.level_, b.level_)); }
    /// The more visible of two: a or b.
    static constexpr visibility greatest(visibility a, visibility b) { return visibility(std::max(a.level_, b.level_)); }

private:
    constexpr explicit visibility(std::same_as<int> auto level) : level_(level) {}

    int level_; // 0 none, 1 some, 2 all
};

inline constexpr visibility visibility::none{false}, visibility::some{false, false}, visibility::all{true};

/// What both show.
template <class A, detail::VisibilityWith<A> B>
constexpr visibility operator&&(A x, B y) {
    return visibility::least(x, y);
}

/// What one of them shows.
template <class A, detail::VisibilityWith<A> B>
constexpr visibility operator||(A x, B y) {
    return visibility::greatest(x, y);
}

/// The visibility of pairs that both show, or both hide.
template <class A, detail::VisibilityWith<A> B>
constexpr visibility operator==(A x, B y) {
    const visibility a(x), b(y);
    return (a && b) || (!a && !b);
}

/// The visibility of pairs that one shows and the other hides.
template <class A, detail::VisibilityWith<A> B>
constexpr visibility operator!=(A x, B y) {
    return !(x == y);
}

} // namespace attn
