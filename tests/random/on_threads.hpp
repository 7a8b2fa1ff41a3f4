// Executors of one to four threads.
#pragma once

#include <attn/parallel/executor.hpp>
#include <attn/parallel/thread_pool.hpp>

namespace attn::fuzz {

/// f(execution) with so many threads.
template <class F>
void on_threads(index_t threads, workspace& memory, const F& f) {
    static thread_pool pools[] = {thread_pool(2), thread_pool(3), thread_pool(4)};
    sequential here;
    if (threads == 1) f(execution(here, memory));
    else f(execution(pools[threads - 2], memory));
}

} // namespace attn::fuzz
