// expect: deleted
// An execution that is kept, of an executor that is gone before a call runs on it.
#include <attn/parallel/thread_pool.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::execution run{attn::thread_pool(2)};
#else
    attn::thread_pool threads(2);
    const attn::execution run{threads};
#endif
    return run.concurrency() == 2 ? 0 : 1;
}
