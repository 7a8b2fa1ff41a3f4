// Ranks that are threads.
#include "catch.hpp"
#include "communicator_checks.hpp"

#include <attn/distributed/thread_communicator.hpp>

#include <atomic>

namespace attn::testing {

TEST_CASE("thread_communicator: 1 to 9 ranks send each other what they should", "[distributed][parallel]") {
    const index_t ranks = GENERATE(1, 2, 3, 4, 5, 7, 8, 9);
    std::atomic<index_t> done = 0;
    on_thread_ranks(ranks, [&](thread_communicator& own) {
        require(own.size() == ranks, "as many as asked for");
        check_communicator(own);
        ++done;
    });
    CHECK(done == ranks);
}

TEST_CASE("thread_communicator: a send waits for its receive", "[distributed][parallel]") {
    on_thread_ranks(2, [&](thread_communicator& own) {
        std::byte byte{5}, token{1};
        if (own.rank() == 0) {
            auto sending = own.send(1, 1, {&byte, 1});
            require(!own.test(sending), "nobody has received");
            auto go = own.send(1, 0, {&token, 1});
            own.wait(go);
            own.wait(sending);
        } else {
            auto go = own.receive(0, 0, {&token, 1});
            own.wait(go);
            byte = {};
            auto receiving = own.receive(0, 1, {&byte, 1});
            own.wait(receiving);
            require(byte == std::byte{5}, "it is what was sent");
        }
    });
}

TEST_CASE("thread_communicator: a rank that throws ends the waiting of all, and is who is heard", "[distributed][parallel]") {
    const index_t ranks = GENERATE(1, 2, 5);
    const index_t thrower = GENERATE(0, 4);
    if (thrower >= ranks) return;
    std::atomic<index_t> told = 0;
    const auto run = [&] {
        on_thread_ranks(ranks, [&](thread_communicator& own) {
            if (own.rank() == thrower) throw std::runtime_error("enough");
            std::vector<std::byte> never(100);
            auto request = own.rank() % 2 ? own.receive(thrower, 0, never) : own.send(thrower, 0, never);
            try {
                if (own.rank() == 1)
                    while (!own.test(request)) {}
                own.wait(request);
            } catch (const rank_error&) {
                ++told;
                throw;
            }
        });
    };
    CHECK_THROWS_WITH(run(), "enough");
    CHECK(told == ranks - 1);
}

TEST_CASE("thread_communicator: no ranks are refused", "[distributed]") {
    CHECK_THROWS_WITH(on_thread_ranks(0, [](auto&) {}), "on_thread_ranks: ranks must be at least 1, not 0");
    static_assert(Communicator<thread_communicator>);
    static_assert(!Communicator<sequential>);
}

} // namespace attn::testing
