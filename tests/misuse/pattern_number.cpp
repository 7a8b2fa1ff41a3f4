// expect: attn: a predicate returns a comparison, not a number
// A lambda whose result is a number.
#include <attn/pattern/causal.hpp>
#include <attn/pattern/predicate.hpp>

int main() {
    const attn::pattern::predicate p{[](auto i, auto j) {
#ifdef ATTN_MISUSE
        return (i - j) % 4;
#else
        return (i - j) % 4 != 0;
#endif
    }};
    const auto both = attn::causal{} & p;
    return both.visible(attn::index_t{1}, attn::index_t{0}) ? 1 : 0;
}
