// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\)
// flags: -Wno-conversion
// A lambda that takes its positions as int.
#include <attn/pattern/causal.hpp>
#include <attn/pattern/predicate.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::pattern::predicate p{[](int i, int j) { return i - j < 8; }};
#else
    const attn::pattern::predicate p{[](auto i, auto j) { return i - j < 8; }};
#endif
    const auto both = attn::causal{} & p;
    return both.visible(attn::index_t{1}, attn::index_t{0}) ? 1 : 0;
}
