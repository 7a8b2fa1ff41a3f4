// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\)
// A lambda that subscripts a pointer.
#include <attn/pattern/local.hpp>
#include <attn/pattern/predicate.hpp>

bool mask[64];

int main() {
    const bool* table = mask;
    const attn::pattern::predicate p{[table](auto i, auto j) {
#ifdef ATTN_MISUSE
        return table[i - j];
#else
        return j <= i && (table != nullptr);
#endif
    }};
    const auto both = p & attn::pattern::local{8};
    return both.visible(attn::index_t{1}, attn::index_t{0}) ? 1 : 0;
}
