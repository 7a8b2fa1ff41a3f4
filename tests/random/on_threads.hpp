// Executors of one to four threads.
#pragma once

#include <attn/parallel/executor.hpp>
#include <attn/parallel/thread_pool.hpp>

namespace attn::fuzz {

/// f(execution) with so many threads, and what it returns.
template <class F>
auto on_threads(index_t threads, workspace& memory, const F& f) {
    static thread_pool pools[] = {thread_pool(2), thread_pool(3), thread_pool(4)};
    sequential here;
    if (threads == 1) return f(execution(here, memory));
    return f(execution(pools[threads - 2], memory));
}

/// The same, with a workspace that f has no need of.
template <class F>
auto on_threads(index_t threads, const F& f) {
    workspace none;
    return on_threads(threads, none, f);
}

} // namespace attn::fuzz
