// expect: sequence_parallel does not know this operator
#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/distributed/sequence_parallel.hpp>
#include <attn/distributed/thread_communicator.hpp>

void attend_over(attn::thread_communicator& ranks, const attn::partition& parts, const attn::inputs<float>& in) {
#ifdef ATTN_MISUSE
    const attn::lsh_attention op;
#else
    const attn::softmax_attention op;
#endif
    static_cast<void>(attn::attend(attn::sequence_parallel{op, parts}, ranks, in));
}
