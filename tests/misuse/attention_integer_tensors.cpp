// expect: attn: q, k and v are tensors of float, double or 16-bit numbers
// Tensors of int.
#include <attn/attention/softmax_attention.hpp>

int main() {
#ifdef ATTN_MISUSE
    using number = int;
#else
    using number = float;
#endif
    const attn::tensor<number> x({1, 1, 4, 8});
    return attn::attend(attn::softmax_attention{}, x, x, x).shape().tokens == 4 ? 0 : 1;
}
