// expect: deleted
// A tensor's own view, read after the tensor is gone.
#include <attn/core/tensor.hpp>

int main() {
#ifdef ATTN_MISUSE
    const auto view = attn::tensor<float>({1, 1, 3, 4}).view();
#else
    const attn::tensor<float> named({1, 1, 3, 4});
    const auto view = named.view();
#endif
    return view(0, 0, 2, 3) == 0 ? 0 : 1;
}
