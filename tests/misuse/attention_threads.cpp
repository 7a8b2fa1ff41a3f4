// expect: attn: what runs a call is an executor, such as attn::thread_pool.2., or an execution, no number
// A number of threads instead of an executor.
#include <attn/attention/softmax_attention.hpp>
#include <attn/parallel/thread_pool.hpp>

int main() {
    const attn::tensor<float> x({1, 1, 4, 8});
#ifdef ATTN_MISUSE
    const int threads = 2;
#else
    attn::thread_pool threads(2);
#endif
    return attn::attend(attn::softmax_attention{}, x, x, x, threads).shape().tokens == 4 ? 0 : 1;
}
