// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\)
// A lambda that branches on a comparison.
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/schedule.hpp>

int main() {
    const attn::pattern::predicate p{[](auto i, auto j) {
#ifdef ATTN_MISUSE
        if (j < i) return i - j < 8;
        return j - i < 4;
#else
        return (j < i && i - j < 8) || (!(j < i) && j - i < 4);
#endif
    }};
    attn::for_each_run(p, {0, 16, 1}, 0, 64, 8, [](const attn::key_run&) {});
}
