// Your program has threads already: attention runs on them. An executor is two functions.
#include <attn/attention/softmax_attention.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <latch>
#include <mutex>
#include <thread>
#include <vector>

namespace {

/// Stands for the pool that your program has.
class my_pool {
public:
    explicit my_pool(int threads) {
        for (int t = 0; t < threads; ++t) threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    }
    int size() const { return static_cast<int>(threads_.size()); }
    void submit(std::function<void()> job) {
        {
            const std::lock_guard lock(mutex_);
            jobs_.push_back(std::move(job));
        }
        wake_.notify_one();
    }

private:
    void work(const std::stop_token& stop) {
        for (;;) {
            std::unique_lock lock(mutex_);
            if (!wake_.wait(lock, stop, [this] { return !jobs_.empty(); })) return;
            const auto job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job();
        }
    }

    std::mutex mutex_;
    std::condition_variable_any wake_;
    std::deque<std::function<void()>> jobs_;
    std::vector<std::jthread> threads_; // last: joined first
};

/// What attn asks of it. The calling thread works too, so a pool of n threads runs n + 1 bodies at once.
struct my_executor {
    my_pool& pool;

    attn::index_t concurrency() const { return pool.size() + 1; }
    void parallel_for(attn::index_t count, attn::function_ref body) const {
        if (count < 1) return;
        std::latch done(count - 1);
        for (attn::index_t i = 1; i < count; ++i)
            pool.submit([&done, body, i] {
                body(i);
                done.count_down();
            });
        body(0);
        done.wait();
    }
};
static_assert(attn::Executor<my_executor>);

} // namespace

int main() {
    const auto x = attn::tensor<float>::random({.batch = 2, .heads = 3, .tokens = 200, .channels = 32}, 1);
    const attn::inputs<float> in{x, x, x};

    my_pool pool(3);
    my_executor threads{pool};
    attn::sequential alone;
    const attn::softmax_attention<> op;
    const auto a = attn::attend(op, in, threads), b = attn::attend(op, in, alone);
    std::printf("%td threads give the same bits as one: %s\n", threads.concurrency(),
                std::ranges::equal(a.elements(), b.elements()) ? "yes" : "no");
}
