#include "parallel_checks.hpp"

namespace attn::testing {

namespace {

/// What a user writes to lend attn threads: two functions.
class threads_per_call {
public:
    index_t concurrency() const { return 3; }
    void parallel_for(index_t count, function_ref body) {
        std::vector<std::jthread> threads;
        for (index_t i = 0; i < count; ++i) threads.emplace_back([=] { body(i); });
    }
};

/// Legal, if odd: backwards, on the calling thread.
struct backwards {
    index_t concurrency() const { return 4; }
    void parallel_for(index_t count, function_ref body) const {
        while (count-- > 0) body(count);
    }
};

struct no_threads {
    index_t concurrency() const { return 0; }
    void parallel_for(index_t, function_ref) const { throw std::logic_error("not needed"); }
};

struct lacks_concurrency {
    void parallel_for(index_t, function_ref) const;
};

} // namespace

TEST_CASE("sequential: runs everything on the calling thread, in order", "[parallel]") {
    sequential executor;
    check_executor(executor);
    std::vector<index_t> order;
    const auto caller = std::this_thread::get_id();
    workspace memory;
    execution(executor, memory).for_each(5, [&](index_t task, index_t slice) {
        CHECK(std::this_thread::get_id() == caller);
        CHECK(slice == 0);
        order.push_back(task);
    });
    CHECK(order == std::vector<index_t>{0, 1, 2, 3, 4});
}

TEST_CASE("execution: asks for 4096 threads at most, whatever an executor says", "[parallel]") {
    struct boundless {
        index_t most = 0;
        index_t concurrency() const { return std::numeric_limits<index_t>::max(); }
        void parallel_for(index_t count, function_ref body) {
            most = std::max(most, count);
            for (index_t i = 0; i < count; ++i) body(i);
        }
    };
    boundless executor;
    workspace memory;
    std::atomic<index_t> done = 0;
    execution(executor, memory).for_each(10'000, [&](index_t, index_t slice) { done += slice < 4096; });
    CHECK(done == 10'000);
    CHECK(executor.most == 4096);
}

TEST_CASE("Executor: a user's own class is one", "[parallel]") {
    threads_per_call own;
    check_executor(own);
    backwards odd;
    check_executor(odd);
    STATIC_REQUIRE_FALSE(Executor<lacks_concurrency>);
    STATIC_REQUIRE_FALSE(Executor<int>);
}

TEST_CASE("execution: refers to its executor and workspace, and counts at least one thread", "[parallel]") {
    const no_threads executor;
    workspace memory;
    const execution run(executor, memory);
    CHECK(run.concurrency() == 1);
    CHECK(&run.workspace() == &memory);
    index_t sum = 0;
    run.for_each(4, [&](index_t task, index_t) { sum += task; });
    CHECK(sum == 6);
}

TEST_CASE("function_ref: refers to the callable, and keeps its state", "[parallel]") {
    index_t calls = 0;
    auto counter = [&, own = index_t{0}](index_t i) mutable { calls = ++own + i; };
    const function_ref body(counter);
    const auto copy = body;
    body(10);
    copy(10);
    CHECK(calls == 12);
    STATIC_REQUIRE(sizeof(function_ref) == 2 * sizeof(void*));
}

} // namespace attn::testing
