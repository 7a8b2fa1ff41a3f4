// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\)
// A lambda that chooses with ?:.
#include <attn/pattern/predicate.hpp>

static_assert([] {
    const attn::pattern::predicate p{[](auto i, auto j) {
#ifdef ATTN_MISUSE
        return j < 4 ? i < 8 : j <= i;
#else
        return (j < 4 && i < 8) || (!(j < 4) && j <= i);
#endif
    }};
    return attn::Pattern<decltype(p)>;
}());

int main() {}
