// expect: deleted
// A layer of parameters that are gone before it reads them.
#include <attn/layer/parameters.hpp>

static attn::parameters filled() {
    attn::parameters weights;
    weights.add<float>("up.weight", {3, 4});
    return weights;
}

int main() {
#ifdef ATTN_MISUSE
    const attn::linear layer = filled().get_linear<float>("up", 3, 4);
#else
    const attn::parameters weights = filled();
    const attn::linear layer = weights.get_linear<float>("up", 3, 4);
#endif
    return layer.outputs() == 3 ? 0 : 1;
}
