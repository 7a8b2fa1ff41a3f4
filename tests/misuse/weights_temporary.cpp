// expect: deleted
// A weight that is gone before the layer reads it.
#include <attn/layer/linear.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::linear layer{.weight = attn::tensor<float>({1, 1, 3, 4})};
#else
    const attn::tensor<float> weight({1, 1, 3, 4});
    const attn::linear layer{.weight = weight};
#endif
    return layer.outputs() == 3 ? 0 : 1;
}
