// expect: deleted
// A tensor's elements, read after the tensor is gone.
#include <attn/core/tensor.hpp>

int main() {
#ifdef ATTN_MISUSE
    const auto elements = attn::tensor<float>({1, 1, 3, 4}).elements();
#else
    const attn::tensor<float> named({1, 1, 3, 4});
    const auto elements = named.elements();
#endif
    return elements[11] == 0 ? 0 : 1;
}
