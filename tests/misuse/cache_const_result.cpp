// expect: attn: a result goes to a tensor, or a view, that is not const
// A step whose result would go to a part of a const tensor.
#include <attn/attention/softmax_attention.hpp>
#include <attn/cache/attend.hpp>
#include <attn/cache/sequence.hpp>

#ifdef ATTN_MISUSE
using result = const attn::tensor<float>;
#else
using result = attn::tensor<float>;
#endif

void step(const attn::tensor<float>& q, const attn::sequence<float>& tokens, result& out) {
    attn::attend(attn::softmax_attention{}, q, tokens, out.slice({.tokens = {0, 1}}));
}
