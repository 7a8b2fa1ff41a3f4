// expect: over ranks, softmax attention, if its products are not rounded, and recurrent attention have a gradient
#include <attn/attention/linear_attention.hpp>
#include <attn/distributed/backward.hpp>
#include <attn/distributed/thread_communicator.hpp>

void backward_over(attn::thread_communicator& ranks, const attn::partition& parts, const attn::inputs<float>& in, const attn::tensor_view<float>& wanted) {
#ifdef ATTN_MISUSE
    const attn::linear_attention op;
#else
    const attn::softmax_attention op;
#endif
    const attn::input_gradients<float> of_inputs{wanted};
    attn::backward(attn::sequence_parallel{op, parts}, ranks, in, {wanted}, {wanted}, {of_inputs});
}
