// Executors of one to four threads; where programs have none, of as many bodies at once, one after another.
#pragma once

#include <attn/parallel/executor.hpp>
#include <attn/parallel/thread_pool.hpp>

namespace attn::fuzz {

#ifndef __STDCPP_THREADS__
struct thread_pool {
    index_t threads;

    explicit thread_pool(index_t n) : threads(n) {}
    index_t concurrency() const { return threads; }
    void parallel_for(index_t count, function_ref body) const {
        while (count > 0) body(--count);
    }
};
#endif

/// f(executor) of so many threads, and what it returns.
template <class F>
auto with_executor(index_t threads, const F& f) {
    static thread_pool pools[] = {thread_pool(2), thread_pool(3), thread_pool(4)};
    sequential here;
    return threads == 1 ? f(here) : f(pools[threads - 2]);
}

/// f(execution) with so many threads, and what it returns.
template <class F>
auto on_threads(index_t threads, workspace& memory, const F& f) {
    return with_executor(threads, [&](auto& executor) { return f(execution(executor, memory)); });
}

/// The same, with a workspace that grows.
template <class F>
auto on_threads(index_t threads, const F& f) {
    return with_executor(threads, [&](auto& executor) { return f(execution(executor)); });
}

} // namespace attn::fuzz
