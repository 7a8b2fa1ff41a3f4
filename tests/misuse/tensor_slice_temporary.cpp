// expect: deleted
// A part of a tensor that is gone before the view is read.
#include <attn/core/tensor.hpp>

int main() {
#ifdef ATTN_MISUSE
    const auto part = attn::tensor<float>({1, 1, 3, 4}).slice({.tokens = {1, 2}});
#else
    const attn::tensor<float> named({1, 1, 3, 4});
    const auto part = named.slice({.tokens = {1, 2}});
#endif
    return part(0, 0, 1, 3) == 0 ? 0 : 1;
}
