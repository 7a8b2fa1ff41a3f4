// expect: attn: q, k and v must be of double, or each of float or 16-bit numbers
// Values in double beside queries in float.
#include <attn/attention/softmax_attention.hpp>

int main() {
    const attn::tensor<float> q({1, 1, 4, 8}), k({1, 1, 4, 8});
#ifdef ATTN_MISUSE
    const attn::tensor<double> v({1, 1, 4, 8});
#else
    const attn::tensor<float> v({1, 1, 4, 8});
#endif
    return attn::attend(attn::softmax_attention{}, q, k, v).shape().tokens == 4 ? 0 : 1;
}
