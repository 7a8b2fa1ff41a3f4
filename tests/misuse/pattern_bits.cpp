// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\)
// A lambda that looks at bits of a position.
#include <attn/pattern/causal.hpp>
#include <attn/pattern/predicate.hpp>

int main() {
    const attn::pattern::predicate p{[](auto i, auto j) {
#ifdef ATTN_MISUSE
        return ((i ^ j) & 1) == 0;
#else
        return (i - j) % 2 == 0;
#endif
    }};
    const auto both = attn::causal{} & p;
    return both.visible(attn::index_t{1}, attn::index_t{0}) ? 1 : 0;
}
