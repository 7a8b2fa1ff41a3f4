// Compiled with OpenMP where the compiler has it; elsewhere attn::openmp does not exist and there is nothing to test.
#include "parallel_checks.hpp"

#include <attn/parallel/openmp.hpp>

#ifdef _OPENMP

namespace attn::testing {

TEST_CASE("openmp: an executor of 1, 2, 3 and 8 threads", "[parallel][portable]") {
    const index_t threads = GENERATE(1, 2, 3, 8);
    openmp executor{.threads = threads};
    CHECK(executor.concurrency() == threads);
    check_executor(executor);
}

TEST_CASE("openmp: the caller and its threads work at once", "[parallel]") {
    openmp executor{.threads = 3};
    check_concurrent(executor);
}

TEST_CASE("openmp: a throwing body waits for the others, and reaches the caller", "[parallel]") {
    const openmp executor{.threads = 3};
    check_throwing_bodies(executor);
}

TEST_CASE("openmp: as many threads as OpenMP by default, and never none", "[parallel]") {
    CHECK(openmp{}.concurrency() == omp_get_max_threads());
    openmp none{.threads = 0};
    CHECK(none.concurrency() == 1);
    check_parallel_for(none);
}

TEST_CASE("openmp: inside the user's parallel region every thread may call it", "[parallel]") {
    openmp executor{.threads = 2};
    std::atomic<index_t> sum = 0;
#pragma omp parallel num_threads(2)
    executor.parallel_for(2, [&](index_t i) { sum += i + 1; });
    CHECK(sum == 6);
}

} // namespace attn::testing

#endif
