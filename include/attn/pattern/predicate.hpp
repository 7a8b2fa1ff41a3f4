// Patterns of one's own.
#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// A pattern of the user's own: a generic function of the absolute positions of a query and a key,
///     predicate{[w](auto i, auto j) { return j <= i && (i - j < w || j % 4 == 0); }}
/// in + - * / %, comparisons, && || !, and attn::floor_div, floor_mod, abs. It captures by value, and is called from all threads.
template <class F>
struct predicate {
    F function;

    constexpr auto visible(const auto& i, const auto& j) const {
        using seen = decltype(function(i, j));
        static_assert(!std::same_as<seen, position_range>, "attn: a predicate returns a comparison, not a number");
        if constexpr (!std::same_as<seen, position_range>) return function(i, j);
        else return visibility::some; // one error is enough
    }
};

/// Deduces the predicate of a lambda.
template <class F>
predicate(F) -> predicate<F>;

} // namespace attn::pattern
