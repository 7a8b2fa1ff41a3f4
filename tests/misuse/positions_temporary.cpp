// expect: deleted function
// Positions that are gone before the call reads them.
#include <attn/core/inputs.hpp>

#include <vector>

int main() {
#ifdef ATTN_MISUSE
    const attn::positions where{.first_query = attn::per_batch(std::vector<attn::index_t>{3, 5})};
#else
    const std::vector<attn::index_t> first{3, 5};
    const attn::positions where{.first_query = attn::per_batch(first)};
#endif
    return where.first_query.count() == 2 ? 0 : 1;
}
