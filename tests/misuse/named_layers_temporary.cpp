// expect: deleted
// A layer by its names, of parameters that are gone before it reads them.
#include <attn/layer/named_layers.hpp>

static attn::parameters filled() {
    attn::parameters weights;
    for (const char* name : {"up.weight", "down.weight"}) weights.add<float>(name, {4, 4});
    return weights;
}

int main() {
#ifdef ATTN_MISUSE
    const attn::feed_forward layer = attn::get_feed_forward<float>(filled(), "");
#else
    const attn::parameters weights = filled();
    const attn::feed_forward layer = attn::get_feed_forward<float>(weights, "");
#endif
    return layer.up.outputs() == 4 ? 0 : 1;
}
