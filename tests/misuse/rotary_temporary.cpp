// expect: deleted|no viable conversion
// A table of rotary positions that is gone before a cache reads it.
#include <attn/cache/key_value_pool.hpp>
#include <attn/layer/rotary.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::rotary_reading<float> reading{.table = attn::rotary<float>(100, 8)};
#else
    const attn::rotary<float> turns(100, 8);
    const attn::rotary_reading<float> reading{.table = turns};
#endif
    return reading.table.pairs == 4 ? 0 : 1;
}
