// What a communicator is: ranks that send each other bytes, by MPI, by threads, or by what a user has; and what they tell each other before
// they send anything else, and when they are done: whether all are well, and call the same.
#pragma once

#include "../core/shape.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What attn throws on a rank because of another one, which has failed or calls something else: "sequence_parallel: rank 2 has failed:
/// ...".
struct rank_error : std::runtime_error {
    static constexpr error_kind kind = error_kind::rank;
    using std::runtime_error::runtime_error;
};

/// One of several ranks, processes or threads that make the same calls, each with its part of the data.
/// - `rank()`, `size()`: which of how many, 0 <= rank < size. The same for the communicator's lifetime.
/// - `send(to, tag, bytes)`, `receive(from, tag, bytes)`: begin to send, or to receive as many, and return a `request` at once. Until that
///   is done the bytes belong to it. Messages of the same two ranks and tag arrive in the order of their sending. Tags are 0 to 32767;
///   there are at least one byte and, where memory has room, no limit to how many. A send may wait for its receive to have begun.
/// - `test(request)`: whether it is done; also moves on what is under way.
/// - `wait(request)`: returns when it is done. A request that is made by default, or has been waited for, is.
/// Only the thread that makes a call of attn asks the communicator; the threads of an executor do not.
template <class C>
concept Communicator =
    std::default_initializable<typename C::request> && std::movable<typename C::request> &&
    requires(C& c, typename C::request& request, index_t n, std::span<const std::byte> sent, std::span<std::byte> received) {
        { c.rank() } -> std::convertible_to<index_t>;
        { c.size() } -> std::convertible_to<index_t>;
        { c.send(n, n, sent) } -> std::same_as<typename C::request>;
        { c.receive(n, n, received) } -> std::same_as<typename C::request>;
        { c.test(request) } -> std::convertible_to<bool>;
        c.wait(request);
    };

namespace detail {

/// What every rank gives, as many bytes each and at least one, in the order of ranks. In log2(size) rounds (Bruck et al. 1997).
std::vector<std::byte> all_gather(Communicator auto& ranks, std::span<const std::byte> own) {
    const index_t size = ranks.size(), rank = ranks.rank(), each = std::ssize(own);
    std::vector<std::byte> turned(to_size(product(size, each))), all(turned.size()); // turned: from the own rank on
    std::ranges::copy(own, turned.begin());
    const auto some = [each](std::vector<std::byte>& bytes, index_t first, index_t count) {
        return std::span(bytes).subspan(static_cast<std::size_t>(first * each), static_cast<std::size_t>(count * each));
    };
    for (index_t known = 1; known < size; known *= 2) {
        const auto count = std::min(known, size - known);
        auto receiving = ranks.receive((rank + known) % size, 0, some(turned, known, count));
        auto sending = ranks.send((rank - known + size) % size, 0, some(turned, 0, count));
        ranks.wait(receiving);
        ranks.wait(sending);
    }
    for (index_t r = 0; r < size; ++r) std::ranges::copy(some(turned, (r - rank + size) % size, 1), some(all, r, 1).begin());
    return all;
}

/// The bytes of `root`, at least one, reach all others, which have as much memory for them.
void broadcast(Communicator auto& ranks, index_t root, std::span<std::byte> bytes) {
    const index_t size = ranks.size(), behind = (ranks.rank() - root + size) % size;
    for (index_t know = 1; know < size; know *= 2) {
        if (behind >= 2 * know || (behind < know && behind + know >= size)) continue;
        auto message = behind < know ? ranks.send((ranks.rank() + know) % size, 0, bytes)
                                     : ranks.receive((ranks.rank() - know + size) % size, 0, bytes);
        ranks.wait(message);
    }
}

/// A number that all ranks must have alike, and what errors call it.
using agreed_number = std::pair<const char*, index_t>;

/// What one rank says; of one size, whatever is called.
struct rank_report {
    index_t failed = 0;
    std::array<index_t, 30> numbers{};
    std::array<char, 264> reason{}; ///< of a failure
};

inline std::string reason_of(const std::exception_ptr& failure) {
    std::string reason = "an exception that is no std::exception";
    try_catch(
        [&] { try_catch<std::exception>([&] { std::rethrow_exception(failure); }, [&](const auto& error) { reason = error.what(); }); },
        [] {});
    return reason;
}

/// What a rank says of itself.
inline rank_report report_of(const std::exception_ptr& failure, std::initializer_list<agreed_number> numbers) {
    rank_report own;
    std::transform(numbers.begin(), numbers.end(), own.numbers.begin(), [](const auto& number) { return number.second; });
    if (!failure) return own;
    own.failed = 1;
    const auto reason = reason_of(failure);
    std::copy_n(reason.data(), std::min(reason.size(), own.reason.size() - 1), own.reason.begin());
    return own;
}
/// Throws what the reports of all ranks, as bytes, say: rank_error if one has failed, argument_error if they differ in a number.
inline void check_reports(std::string_view operation, std::initializer_list<agreed_number> numbers, std::span<const std::byte> bytes) {
    std::vector<rank_report> all(bytes.size() / sizeof(rank_report));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r].failed)
            detail::raise(rank_error(std::string(operation) + ": rank " + std::to_string(r) + " has failed: " + all[r].reason.data()));
    for (std::size_t i = 0; i < numbers.size(); ++i)
        for (std::size_t r = 1; r < all.size(); ++r)
            if (all[r].numbers[i] != all[0].numbers[i])
                detail::raise(argument_error(operation, "ranks", "0 and ", r, " differ in ", numbers.begin()[i].first, ": ",
                                             all[0].numbers[i], " and ", all[r].numbers[i]));
}
/// Returns on all ranks, or throws on all: its own failure, if there is one; else what the reports say.
void agree(Communicator auto& ranks, std::string_view operation, const std::exception_ptr& failure,
           std::initializer_list<agreed_number> numbers = {}) {
    const auto own = report_of(failure, numbers);
    const auto all = all_gather(ranks, std::as_bytes(std::span(&own, 1)));
    if (failure) std::rethrow_exception(failure);
    check_reports(operation, numbers, all);
}

/// What f throws, if anything.
std::exception_ptr failure_of(const auto& f) {
    std::exception_ptr failure;
    try_catch(f, [&] { failure = std::current_exception(); });
    return failure;
}
/// Bytes on their way from rank to rank: from whom they come and to whom they go on, if there is somebody, and where they lie.
struct relayed_bytes {
    index_t before = -1, next = -1;
    std::span<std::byte> received, sent;
};
/// A rank's part in pieces that go from one rank to the next: some are received, from whom piece(number) says, add(first, end) adds its own
/// to them, and they go on. Each is a message of its own, for ranks may take more or fewer at once. Returns what `add` has thrown: who has
/// failed still passes on what others wait for.
template <Communicator C>
std::exception_ptr relay(C& ranks, index_t count, index_t at_once, const auto& piece, const auto& add) {
    std::exception_ptr failure;
    std::vector<typename C::request> sending;
    for (index_t first = 0; first < count; first += at_once) {
        const auto end = std::min(count, first + at_once);
        for (auto number = first; number < end; ++number)
            if (const relayed_bytes own = piece(number); own.before >= 0 && !own.received.empty()) {
                auto message = ranks.receive(own.before, 1, own.received);
                ranks.wait(message);
            }
        if (!failure) failure = failure_of([&] { add(first, end); });
        for (auto number = first; number < end; ++number)
            if (const relayed_bytes own = piece(number); own.next >= 0 && !own.sent.empty())
                sending.push_back(ranks.send(own.next, 1, own.sent));
    }
    for (auto& message : sending) ranks.wait(message);
    return failure;
}

} // namespace detail

} // namespace attn
