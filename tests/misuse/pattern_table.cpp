// expect: attn: this predicate cannot be evaluated on ranges of positions.*attn::pattern::tiles\(mask, n, m\).*attn::pattern::selected
// A lambda that looks positions up in a table.
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/schedule.hpp>

#include <vector>

int main() {
    const std::vector<int> table(64, 1);
    const attn::pattern::predicate p{[&](auto i, auto j) {
#ifdef ATTN_MISUSE
        return table[j] == 1 && j <= i;
#else
        return j <= i && j < std::ssize(table);
#endif
    }};
    attn::for_each_run(p, {0, 16, 1}, 0, 64, 8, [](const attn::key_run&) {});
}
