// expect: attn: any_attention<T> is called on tensors of T
// An operator chosen at run time for floats, called on doubles.
#include <attn/attention/any_attention.hpp>
#include <attn/attention/softmax_attention.hpp>

int main() {
    const attn::any_attention<float> op = attn::softmax_attention<>{};
#ifdef ATTN_MISUSE
    const attn::tensor<double> x({.tokens = 4, .channels = 8});
#else
    const attn::tensor<float> x({.tokens = 4, .channels = 8});
#endif
    return attn::attend(op, x, x, x).shape().tokens == 4 ? 0 : 1;
}
