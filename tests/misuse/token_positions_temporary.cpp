// expect: deleted
// Positions of tokens that are gone before the call reads them.
#include <attn/layer/rotary.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::rotary_positions where = attn::grid_positions(2, 3);
#else
    const auto grid = attn::grid_positions(2, 3);
    const attn::rotary_positions where = grid;
#endif
    return where.axes() == 2 ? 0 : 1;
}
