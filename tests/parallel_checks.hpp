// What every executor must do, whatever it runs on.
#pragma once

#include "catch.hpp"

#include <attn/parallel/executor.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace attn::testing {

template <Executor E>
void check_parallel_for(E& executor) {
    const index_t threads = executor.concurrency();
    REQUIRE(threads >= 1);
    for (index_t count = 0; count <= threads; ++count) {
        std::vector<std::atomic<int>> calls(static_cast<std::size_t>(threads));
        executor.parallel_for(count, [&](index_t i) { ++calls[static_cast<std::size_t>(i)]; });
        for (index_t i = 0; i < threads; ++i) CHECK(calls[static_cast<std::size_t>(i)] == (i < count ? 1 : 0));
    }
}

/// Every task once, and no two running bodies with the same slice, though the tasks differ in length.
template <Executor E>
void check_for_each(E& executor) {
    workspace memory;
    const execution run(executor, memory);
    for (index_t count : {0, 1, 2, 3, 7, 97, 1000}) {
        std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
        std::vector<std::atomic<int>> inside(static_cast<std::size_t>(run.concurrency()));
        std::atomic<int> shared_slices = 0;
        run.for_each(count, [&](index_t task, index_t slice) {
            auto& visitors = inside[static_cast<std::size_t>(slice)];
            if (++visitors != 1) ++shared_slices;
            ++calls[static_cast<std::size_t>(task)];
            for (std::atomic<index_t> work = 0; work < (task % 13) * 50;) ++work;
            --visitors;
        });
        CHECK(shared_slices == 0);
        CHECK(std::ranges::all_of(calls, [](const auto& n) { return n == 1; }));
    }
}

/// An exception stops the tasks that have not begun and reaches the caller, and the executor still works.
template <Executor E>
void check_exceptions(E& executor) {
    workspace memory;
    const execution run(executor, memory);
    for (index_t thrower : {0, 1, 50, 99}) {
        const auto body = [&](index_t task, index_t) {
            if (task == thrower) throw std::runtime_error("task");
        };
        CHECK_THROWS_AS(run.for_each(100, body), std::runtime_error);
        CHECK_THROWS_AS(run.for_each(100, [](index_t, index_t) { throw 42; }), int);
    }

    constexpr index_t count = 100'000;
    std::atomic<bool> thrown = false;
    std::atomic<index_t> others = 0;
    const auto body = [&](index_t task, index_t) {
        if (task == 0) {
            thrown = true;
            throw std::runtime_error("the first");
        }
        while (!thrown) std::this_thread::yield();
        std::this_thread::yield();
        ++others;
    };
    CHECK_THROWS_WITH(run.for_each(count, body), "the first");
    CHECK(others < count - 1);

    check_for_each(executor);
}

/// All slices of a call run at once: each waits (not for ever) for the others, so one thread could not run two of them.
template <Executor E>
void check_concurrent(E& executor) {
    const index_t count = executor.concurrency();
    std::atomic<index_t> arrived = 0;
    std::mutex mutex;
    std::set<std::thread::id> threads;
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    executor.parallel_for(count, [&](index_t) {
        ++arrived;
        while (arrived < count && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
        const std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
    });
    CHECK(std::ssize(threads) == count);
    CHECK(threads.contains(std::this_thread::get_id()));
}

/// A task that calls the same executor.
template <Executor E>
void check_nested(E& executor) {
    workspace memory;
    const execution run(executor, memory);
    std::atomic<index_t> sum = 0;
    run.for_each(8, [&](index_t outer, index_t) {
        workspace inner_memory;
        const execution inner(executor, inner_memory);
        inner.for_each(16, [&](index_t task, index_t) { sum += outer * 16 + task; });
    });
    CHECK(sum == 128 * 127 / 2);
}

/// Several threads of the user call one executor at a time.
template <Executor E>
void check_two_callers(E& executor) {
    std::vector<std::atomic<index_t>> sums(3);
    std::vector<std::thread> callers;
    for (auto& sum : sums)
        callers.emplace_back([&] {
            workspace memory;
            const execution run(executor, memory);
            for (int round = 0; round < 200; ++round) run.for_each(20, [&](index_t task, index_t) { sum += task; });
        });
    for (auto& caller : callers) caller.join();
    for (const auto& sum : sums) CHECK(sum == 200 * 190);
}

/// A body that throws, the caller's or another's: the bodies that run beside it end before the caller goes on, and the executor still
/// works. The others wait (not for ever) until one has thrown, and then stay a while inside what an early return would take away.
template <Executor E>
void check_throwing_bodies(E& executor) {
    const index_t count = executor.concurrency();
    for (index_t thrower = 0; thrower < count; ++thrower) {
        std::atomic<bool> thrown = false;
        std::atomic<index_t> inside = 0;
        const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        const auto body = [&](index_t i) {
            if (i == thrower) {
                while (inside < count - 1 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
                thrown = true;
                throw std::runtime_error("body " + std::to_string(i));
            }
            ++inside;
            while (!thrown && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            --inside;
        };
        CHECK_THROWS_WITH(executor.parallel_for(count, body), "body " + std::to_string(thrower));
        CHECK(inside == 0);
        CHECK(thrown);
    }
    CHECK_THROWS_AS(executor.parallel_for(count, [](index_t) { throw 42; }), int);
    check_parallel_for(executor);
}

template <Executor E>
void check_executor(E& executor) {
    check_parallel_for(executor);
    check_for_each(executor);
    check_exceptions(executor);
    check_nested(executor);
    check_two_callers(executor);
}

} // namespace attn::testing
