// Messages between threads of a process.
#pragma once

#include "executor.hpp"

#ifndef __STDCPP_THREADS__
#error "attn: ranks on threads, in a program that has none"
#endif

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <list>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// What one thread sends and another receives: whoever comes second copies. Both have their own end of it until it is done.
class mailbox {
    struct end {
        index_t from, to, tag;
        const std::byte* source; ///< of a send
        std::byte* target;       ///< of a receive
        std::size_t size;
        enum { waits, copied, done } state;
    };
    using ends = std::list<end>;

public:
    /// One end of a message. One that goes before it is done takes it back.
    class request {
    public:
        request() = default;
        request(request&& other) noexcept : box_(std::exchange(other.box_, nullptr)), end_(other.end_) {}
        request& operator=(request&& other) noexcept {
            std::swap(box_, other.box_);
            std::swap(end_, other.end_);
            return *this;
        }
        ~request() {
            if (box_) box_->take_back(end_);
        }

    private:
        friend mailbox;
        request(mailbox& box, ends::iterator its_end) : box_(&box), end_(its_end) {}

        mailbox* box_ = nullptr;
        ends::iterator end_{};
    };

    request send(index_t from, index_t to, index_t tag, std::span<const std::byte> bytes) {
        return post({from, to, tag, bytes.data(), nullptr, bytes.size(), end::waits});
    }
    request receive(index_t from, index_t to, index_t tag, std::span<std::byte> bytes) {
        return post({from, to, tag, nullptr, bytes.data(), bytes.size(), end::waits});
    }
    /// Whether a message is done. Calls on_failure if it never will be.
    bool test(request& asked, const auto& on_failure) {
        if (!asked.box_) return true;
        std::unique_lock lock(mutex_);
        return settle(asked, lock, on_failure);
    }
    void wait(request& asked, const auto& on_failure) {
        if (!asked.box_) return;
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return asked.end_->state == end::done || (failed_ && asked.end_->state == end::waits); });
        settle(asked, lock, on_failure);
    }
    /// Fails all messages: none that still waits will be done.
    void fail() {
        {
            const std::lock_guard lock(mutex_);
            failed_ = true;
        }
        changed_.notify_all();
    }

private:
    request post(const end& posted) {
        std::unique_lock lock(mutex_);
        const auto own = ends_.insert(ends_.end(), posted);
        const auto other = std::ranges::find_if(ends_, [&](const end& e) {
            return e.state == end::waits && e.from == own->from && e.to == own->to && e.tag == own->tag &&
                   (e.source == nullptr) != (own->source == nullptr);
        });
        if (other != ends_.end()) {
            const auto &sent = own->source ? *own : *other, &received = own->source ? *other : *own;
            own->state = other->state = end::copied;
            lock.unlock();
            std::memcpy(received.target, sent.source, std::min(sent.size, received.size));
            lock.lock();
            own->state = other->state = end::done;
            changed_.notify_all();
        }
        return {*this, own};
    }
    bool settle(request& asked, std::unique_lock<std::mutex>& lock, const auto& on_failure) {
        if (asked.end_->state == end::done) {
            ends_.erase(asked.end_);
            asked.box_ = nullptr;
            return true;
        }
        if (failed_ && asked.end_->state == end::waits) {
            lock.unlock();
            on_failure();
        }
        return false;
    }
    void take_back(ends::iterator its_end) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return its_end->state != end::copied; });
        ends_.erase(its_end);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    ends ends_;
    bool failed_ = false;
};

/// Calls body(0) ... body(count - 1), each on a thread of its own, and at an exception on_failure(its number); the first exception reaches
/// the caller when all are done.
inline void run_on_threads(index_t count, function_ref body, function_ref on_failure) {
    first_exception failure;
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(std::max<index_t>(0, count)));
    const auto begin_all = [&] {
        for (index_t i = 0; i < count; ++i)
            threads.emplace_back([&, i] {
                failure.keep_of([&] { body(i); });
                if (failure.any()) on_failure(i);
            });
    };
    try_catch(begin_all, [&] { // no thread left to have
        failure.keep_of(throw_again);
        on_failure(std::ssize(threads));
    });
    for (auto& thread : threads) thread.join();
    failure.rethrow();
}

} // namespace attn::detail
