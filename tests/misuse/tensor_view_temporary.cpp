// expect: deleted
// A view of a tensor that is gone before the view is read.
#include <attn/core/tensor.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::tensor_view view = attn::tensor<float>({1, 1, 3, 4});
#else
    const attn::tensor<float> named({1, 1, 3, 4});
    const attn::tensor_view view = named;
#endif
    return view(0, 0, 2, 3) == 0 ? 0 : 1;
}
