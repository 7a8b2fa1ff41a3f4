// An executor over Eigen's non-blocking thread pool, present where programs have threads: in WebAssembly they have none.
#pragma once

#include "executor.hpp"

#ifdef __STDCPP_THREADS__

#include <Eigen/Core>

#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool> // Eigen 5
#else
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif

#if __has_include(<sys/wait.h>)
#include <pthread.h>
#endif

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// How many forks lie between the process that asked first and this one. Threads do not come along through a fork.
inline int forks() {
    static std::atomic<int> count = 0;
#if __has_include(<sys/wait.h>)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });
    static_cast<void>(registered);
#endif
    return count.load(std::memory_order_relaxed);
}

} // namespace detail

/// Threads that wait for work. The calling thread is one of them, so a pool of n starts n - 1.
///
/// `parallel_for` may be called by several threads at once, and from inside a body: there it runs inline if the body is on one of
/// the pool's own threads, which keeps nested calls from waiting for each other. A call allocates nothing. If bodies throw, the first
/// exception reaches the caller when all that run are done. After a fork a child has none of the threads: parallel_for throws
/// argument_error there, and a pool that the child makes works.
class thread_pool {
public:
    /// The most threads that Eigen's pool can count.
    static constexpr index_t max_threads = 16'383;

    /// Throws argument_error unless 1 <= threads <= max_threads.
    explicit thread_pool(index_t threads = hardware_threads()) : threads_(checked(threads)) {
        if (threads_ > 1) pool_ = std::make_unique<Eigen::ThreadPool>(static_cast<int>(threads_ - 1));
    }
    ~thread_pool() {
        if (is_elsewhere()) static_cast<void>(pool_.release()); // nobody to wait for
    }
    thread_pool(const thread_pool&) = delete;
    thread_pool& operator=(const thread_pool&) = delete;

    index_t concurrency() const noexcept { return threads_; }

    void parallel_for(index_t count, function_ref body) {
        if (is_elsewhere())
            detail::raise(argument_error("thread_pool", "threads",
                                         "are those of the process before fork, which a child does not have: make a pool there"));
        if (count <= 1 || !pool_ || pool_->CurrentThreadId() != -1) {
            for (index_t i = 0; i < count; ++i) body(i);
            return;
        }
        call state{*this, body, count - 1, {}};
        // Two words: what std::function stores without allocating.
        for (index_t i = 1; i < count; ++i) pool_->Schedule([&state, i] { state.run(i); });
        state.failure.keep_of([&] { body(0); });
        state.wait();
        state.failure.rethrow();
    }

private:
    /// One call of parallel_for, on the caller's stack. It is gone as soon as `running` is 0, so the last slice wakes the caller
    /// through what belongs to the pool.
    struct call {
        thread_pool& owner;
        function_ref body;
        std::atomic<index_t> running;
        detail::first_exception failure;

        void run(index_t i) {
            auto& pool = owner;
            failure.keep_of([&] { body(i); });
            if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                { const std::lock_guard lock(pool.mutex_); }
                pool.finished_.notify_all();
            }
        }
        bool done() const { return running.load(std::memory_order_acquire) == 0; }
        void wait() {
            // Slices end within microseconds of each other, less than a sleep and a wake-up cost.
            for (int spin = 0; spin < 4096; ++spin)
                if (done()) return;
            std::unique_lock lock(owner.mutex_);
            owner.finished_.wait(lock, [this] { return done(); });
        }
    };

    bool is_elsewhere() const { return pool_ && detail::forks() != made_after_; }
    static index_t hardware_threads() { return std::max<index_t>(1, std::thread::hardware_concurrency()); }
    static index_t checked(index_t threads) {
        if (threads < 1 || threads > max_threads)
            detail::raise(argument_error("thread_pool", "threads", "must be 1 to ", max_threads, ", not ", threads));
        return threads;
    }

    index_t threads_;
    int made_after_ = detail::forks();
    std::mutex mutex_;
    std::condition_variable finished_;
    std::unique_ptr<Eigen::ThreadPool> pool_; // last: its threads are joined before what they notify is gone
};

} // namespace attn

#endif
