// expect: deleted function
// Lengths that are gone before the operator reads them.
#include <attn/pattern/lengths.hpp>

#include <vector>

int main() {
#ifdef ATTN_MISUSE
    const attn::pattern::lengths pattern{std::vector<attn::index_t>{3, 5}};
#else
    const std::vector<attn::index_t> present{3, 5};
    const attn::pattern::lengths pattern{present};
#endif
    return pattern.length.size() == 2 ? 0 : 1;
}
