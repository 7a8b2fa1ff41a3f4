// expect: deleted
// Inputs that have a name, of a tensor that is gone before the call reads it.
#include <attn/core/inputs.hpp>

int main() {
    const attn::tensor<float> k({1, 1, 3, 4}), v({1, 1, 3, 4});
#ifdef ATTN_MISUSE
    const attn::inputs<float> in{attn::tensor<float>({1, 1, 3, 4}), k, v};
#else
    const attn::tensor<float> q({1, 1, 3, 4});
    const attn::inputs<float> in{q, k, v};
#endif
    return in.queries.shape() == k.shape() ? 0 : 1;
}
