#include "allocations.hpp"
#include "parallel_checks.hpp"

#include <attn/parallel/thread_pool.hpp>

#if __has_include(<sys/wait.h>)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <chrono>

namespace attn::testing {

TEST_CASE("thread_pool: an executor of 1, 2, 3 and 8 threads", "[parallel]") {
    const index_t threads = GENERATE(1, 2, 3, 8);
    thread_pool pool(threads);
    CHECK(pool.concurrency() == threads);
    check_executor(pool);
}

TEST_CASE("thread_pool: as many threads as the machine by default", "[parallel]") {
    thread_pool pool;
    CHECK(pool.concurrency() == std::max<index_t>(1, std::thread::hardware_concurrency()));
    check_parallel_for(pool);
}

TEST_CASE("thread_pool: an impossible number of threads is refused", "[parallel]") {
    for (index_t threads : {index_t{0}, index_t{-1}, thread_pool::max_threads + 1, index_t{1} << 40})
        CHECK_THROWS_AS(thread_pool(threads), argument_error);
    CHECK_THROWS_WITH(thread_pool(0), "thread_pool: threads must be 1 to 16383, not 0");
}

#if __has_include(<sys/wait.h>)
TEST_CASE("thread_pool: the child of a fork is told that it has none of the threads", "[parallel]") {
    thread_pool pool(2);
    check_parallel_for(pool);
    const auto child = fork();
    if (child == 0) {
        alarm(20); // rather than wait for ever
        try {
            pool.parallel_for(2, [](index_t) {});
        } catch (const argument_error& error) {
            pool.~thread_pool(); // ends, too
            _exit(std::string(error.what()).starts_with("thread_pool: threads are those of the process before fork") ? 0 : 2);
        }
        _exit(1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    check_parallel_for(pool);
}
#endif

TEST_CASE("thread_pool: the caller and its threads work at once", "[parallel]") {
    thread_pool pool(3);
    check_concurrent(pool);
}

TEST_CASE("thread_pool: a throwing body waits for the others, and reaches the caller", "[parallel]") {
    const index_t threads = GENERATE(1, 2, 3, 8);
    thread_pool pool(threads);
    check_throwing_bodies(pool);
}

TEST_CASE("thread_pool: called from one of its own threads it runs inline", "[parallel]") {
    thread_pool pool(2);
    const auto caller = std::this_thread::get_id();
    std::atomic<int> elsewhere = 0;
    pool.parallel_for(2, [&](index_t) {
        const auto self = std::this_thread::get_id();
        if (self == caller) return;
        pool.parallel_for(2, [&](index_t) { elsewhere += std::this_thread::get_id() != self; });
    });
    CHECK(elsewhere == 0);
}

TEST_CASE("thread_pool: waits for a slice that sleeps", "[parallel]") {
    thread_pool pool(2);
    for (index_t slow : {0, 1}) {
        std::atomic<bool> slept = false;
        pool.parallel_for(2, [&](index_t i) {
            if (i != slow) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            slept = true;
        });
        CHECK(slept);
    }
}

TEST_CASE("thread_pool: is destroyed right after its last call", "[parallel]") {
    for (int round = 0; round < 300; ++round) {
        std::atomic<index_t> sum = 0;
        {
            thread_pool pool(3);
            pool.parallel_for(3, [&](index_t i) { sum += i; });
        }
        CHECK(sum == 3);
    }
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEST_CASE("allocations: the counter sees operator new, aligned or not, and malloc", "[parallel]") {
    CHECK(allocations_in([] { ::operator delete(::operator new(12)); }) == 1);
    CHECK(allocations_in([] { const workspace memory(100); }) == 1);
    CHECK(allocations_in([] { std::free(std::malloc(1)); }) <= 1); // an optimiser may drop the pair
}

TEST_CASE("thread_pool: a call allocates nothing", "[parallel]") {
    thread_pool pool(4);
    workspace memory;
    const execution run(pool, memory);
    std::atomic<index_t> sum = 0;
    const auto calls = [&] {
        for (int round = 0; round < 100; ++round) run.for_each(50, [&](index_t task, index_t) { sum += task; });
    };
    calls();
    CHECK(allocations_in(calls) == 0);
    CHECK(sum == 2 * 100 * 49 * 50 / 2);
}
#endif

} // namespace attn::testing
