#include "allocations.hpp"
#include "errors.hpp"
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

TEST_CASE("execution: between its tasks the calling thread does something else, if it is asked to", "[parallel]") {
    const auto caller = std::this_thread::get_id();
    const auto pauses_of = [&](auto& executor, index_t tasks) {
        std::vector<index_t> done_before;
        std::atomic<index_t> done = 0;
        const auto between = [&](index_t) {
            CHECK(std::this_thread::get_id() == caller);
            done_before.push_back(done);
        };
        const execution plain(executor);
        const detail::pausing_execution run(plain, between);
        CHECK(!plain.pauses());
        CHECK(run.pauses());
        run.for_each(tasks, [&](index_t, index_t) { ++done; });
        return done_before;
    };
    sequential here;
    CHECK(pauses_of(here, 3) == std::vector<index_t>{1, 2, 3});
    threads_per_call own;
    CHECK(pauses_of(own, 25) == std::vector<index_t>{12, 24, 25});
    CHECK(pauses_of(own, 0).empty());
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

TEST_CASE("execution: a workspace of its own grows to what operations want, and goes along with it", "[parallel]") {
    const sequential executor;
    execution run(executor);
    CHECK(run.workspace().size_bytes() == 0);
    run.reserve("operation", "x", {}, 1000);
    const auto* const memory = run.workspace().bytes().data();
    CHECK(run.workspace().size_bytes() == 1000);
    CHECK(allocations_in([&] { run.reserve("operation", "x", {}, 900); }) == 0);
    CHECK(run.workspace().size_bytes() == 1000);
    const execution moved = std::move(run);
    CHECK(moved.workspace().bytes().data() == memory);
    CHECK(moved.workspace().size_bytes() == 1000);
    moved.reserve("operation", "x", {}, 2000);
    CHECK(moved.workspace().size_bytes() == 2000);

    const execution alone;
    CHECK(alone.concurrency() == 1);
    alone.reserve("operation", "x", {}, 64);
    CHECK(alone.workspace().size_bytes() == 64);
    STATIC_REQUIRE_FALSE(std::copy_constructible<execution>);
}

TEST_CASE("execution: a workspace that it is given stays as it is, and must hold what an operation needs", "[parallel]") {
    const no_threads executor;
    workspace memory(1000);
    const execution run(executor, memory);
    CHECK(!run.grows());
    const auto needs = [&](std::size_t bytes) {
        return error_of([&] { run.reserve("operation", "x", {.batch = 1, .tokens = 2, .channels = 3}, bytes); });
    };
    CHECK(needs(1000) == nothing_thrown);
    CHECK(needs(1001) == "operation: workspace has 1000 bytes, but x of shape (1, 1, 2, 3) on 1 threads needs 1001");
    CHECK(memory.size_bytes() == 1000);
}

TEST_CASE("execution: a call's own is what the call is given, and grows where that does", "[parallel]") {
    const backwards executor;
    workspace memory(10);
    const execution given(executor, memory), keeps(executor);
    const auto needs = [](std::size_t bytes, const detail::call_execution& run) { run.reserve("operation", "x", {}, bytes); };
    needs(1000, keeps);
    CHECK(keeps.workspace().size_bytes() == 1000);
    CHECK(error_of([&] { needs(1000, given); }) != nothing_thrown);
    CHECK(memory.size_bytes() == 10);
    needs(1000, executor);
    needs(1000, backwards{});
    needs(1000, {});
    STATIC_REQUIRE(std::convertible_to<backwards, detail::call_execution>);
    STATIC_REQUIRE(std::convertible_to<const backwards&, detail::call_execution>);
    STATIC_REQUIRE_FALSE(std::convertible_to<const backwards&, execution>);
    STATIC_REQUIRE_FALSE(std::constructible_from<execution, backwards>);
    STATIC_REQUIRE_FALSE(std::constructible_from<execution, const backwards>);
    STATIC_REQUIRE_FALSE(std::constructible_from<execution, backwards, workspace&>);
    STATIC_REQUIRE_FALSE(std::convertible_to<lacks_concurrency, detail::call_execution>);
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
