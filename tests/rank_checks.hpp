// What ranks that are threads are held to: the bits of the call on one machine, and that none waits for ever for one that has failed.
#pragma once

#include "catch.hpp"
#include "sequence_checks.hpp"

#include <attn/distributed/thread_communicator.hpp>

#include <stdexcept>
#include <string>
#include <vector>

namespace attn::testing {

/// With each of the partitions: ranks with one thread and with two.
template <Scalar T>
void check_over(const auto& op, const inputs<T>& in, const std::vector<partition>& all_parts, bool with_log_sum_exp = true) {
    const auto s = shapes_of(in);
    auto whole = with_log_sum_exp ? no_answer<T>(op.output_shape(s), log_sum_exp_shape(op, s)) : no_answer<T>(op.output_shape(s), false);
    attend(op, in, whole.out());
    for (const auto& parts : all_parts) {
        CAPTURE(s.queries.tokens, s.keys.tokens, parts.ranks());
        CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) { check_rank(op, ranks, parts, in, whole.out(), 1 + ranks.rank() % 2); }));
    }
}

/// An executor that fails after so many calls.
struct failing_executor {
    index_t calls_left;

    index_t concurrency() const { return 2; }
    void parallel_for(index_t count, function_ref body) {
        if (--calls_left < 0) throw std::runtime_error("no threads left");
        while (count > 0) body(--count);
    }
};

/// One rank's executor fails, in its first calls or in later ones: all ranks hear of it, and none waits for ever. call(communicator, executor).
void check_failures(const std::string& name, index_t ranks, const auto& call) {
    for (const index_t thrower : {index_t{0}, ranks - 1})
        for (index_t calls = 0, fails = 1; fails > 0 && calls < 20; ++calls) {
            CAPTURE(thrower, calls);
            std::vector<std::string> errors(static_cast<std::size_t>(ranks));
            on_thread_ranks(ranks, [&](auto& communicator) {
                failing_executor executor{communicator.rank() == thrower ? calls : 1'000'000};
                try {
                    call(communicator, executor);
                } catch (const std::exception& error) { errors[static_cast<std::size_t>(communicator.rank())] = error.what(); }
            });
            fails = errors[static_cast<std::size_t>(thrower)].empty() ? 0 : 1; // until the executor has been called that often
            CHECK((calls > 0 || fails > 0));
            for (index_t rank = 0; rank < ranks && fails > 0; ++rank)
                CHECK(errors[static_cast<std::size_t>(rank)] ==
                      (rank == thrower ? "no threads left" : name + ": rank " + std::to_string(thrower) + " has failed: no threads left"));
        }
}

} // namespace attn::testing
