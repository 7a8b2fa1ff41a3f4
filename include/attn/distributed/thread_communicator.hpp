// Ranks that are threads of one process: for tests, and to see on one machine what a program does on many.
#pragma once

#include "../parallel/mailbox.hpp"
#include "communicator.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A rank that is a thread: what on_thread_ranks gives to each. A send waits for its receive, and nothing is copied twice.
class thread_communicator {
public:
    using request = detail::mailbox::request;

    /// What on_thread_ranks makes.
    thread_communicator(detail::mailbox& box, index_t rank, index_t size) : box_(&box), rank_(rank), size_(size) {}

    index_t rank() const noexcept { return rank_; }
    index_t size() const noexcept { return size_; }
    request send(index_t to, index_t tag, std::span<const std::byte> bytes) { return box_->send(rank_, to, tag, bytes); }
    request receive(index_t from, index_t tag, std::span<std::byte> bytes) { return box_->receive(from, rank_, tag, bytes); }
    /// Throws rank_error if another rank has thrown, here and in wait.
    bool test(request& asked) { return box_->test(asked, refuse); }
    void wait(request& asked) { box_->wait(asked, refuse); }

private:
    static void refuse() { detail::raise(rank_error("thread_communicator: another rank has thrown")); }

    detail::mailbox* box_;
    index_t rank_, size_;
};

/// Calls body(communicator) on `ranks` threads at once, each a rank, and returns when all are done. If one throws, what the others wait for
/// throws rank_error, and the first exception reaches the caller. Throws argument_error unless there is a rank.
void on_thread_ranks(index_t ranks, const auto& body) {
    if (ranks < 1) detail::raise(argument_error("on_thread_ranks", "ranks", "must be at least 1, not ", ranks));
    detail::mailbox box;
    detail::run_on_threads(
        ranks,
        [&](index_t rank) {
            thread_communicator own(box, rank, ranks);
            body(own);
        },
        [&](index_t) { box.fail(); });
}

} // namespace attn
