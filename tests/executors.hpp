// Executors for tests: the library's, and some of a user's own.
#pragma once

#include <attn/parallel/thread_pool.hpp>

#include <thread>
#include <vector>

namespace attn::testing {

/// A user's executor: one thread, the last body first.
struct backwards {
    index_t concurrency() const { return 5; }
    void parallel_for(index_t count, function_ref body) const {
        while (count > 0) body(--count);
    }
};

/// A user's executor: new threads for every call.
struct new_threads {
    int concurrency() { return 4; }
    void parallel_for(index_t count, function_ref body) {
        std::vector<std::thread> threads;
        for (index_t i = 0; i < count; ++i) threads.emplace_back([=] { body(i); });
        for (auto& thread : threads) thread.join();
    }
};

/// A user's executor that fails: at one of the times that it is given work.
struct fails_at {
    mutable index_t time = -1;
    index_t concurrency() const { return 2; }
    void parallel_for(index_t count, function_ref body) const {
        if (time >= 0 && time-- == 0) throw 5;
        for (index_t i = 0; i < count; ++i) body(i);
    }
};

/// Calls f(executor, name) for each but the last.
template <class F>
void for_each_executor(F&& f) {
    sequential one;
    f(one, "sequential");
    for (const index_t threads : {2, 3, 7}) {
        thread_pool pool(threads);
        f(pool, "thread_pool of " + std::to_string(threads));
    }
    backwards user;
    f(user, "a user's, backwards");
    new_threads others;
    f(others, "a user's, with new threads");
}

} // namespace attn::testing
