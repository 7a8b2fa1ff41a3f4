// What every communicator does. On several threads, where Catch2's checks may not be: so what is wrong is thrown.
#pragma once

#include <attn/distributed/communicator.hpp>

#include <numeric>

namespace attn::testing {

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error("not so: " + what);
}

/// So many numbers that tell who sent them to whom.
inline std::vector<index_t> numbers_of(index_t from, index_t to, index_t count) {
    std::vector<index_t> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), from * 1'000'000'007 + to * 1'000'003);
    return numbers;
}

template <Communicator C>
void check_communicator(C& ranks) {
    const index_t rank = ranks.rank(), size = ranks.size();
    require(rank >= 0 && rank < size, "0 <= rank < size");
    typename C::request none;
    require(ranks.test(none), "a request made by default is done");
    ranks.wait(none);

    // Everyone to everyone, itself too, in messages of two tags: those of a tag arrive in order, those of the other may overtake.
    for (const index_t count : {index_t{1}, index_t{1000}, index_t{70'000}}) {
        std::vector<std::vector<index_t>> sent, received;
        std::vector<typename C::request> requests;
        for (index_t other = 0; other < size; ++other)
            for (index_t message = 0; message < 3; ++message) {
                sent.push_back(numbers_of(rank, other, count + message));
                received.emplace_back(static_cast<std::size_t>(count + message));
            }
        const auto at = [](auto& all, index_t other, index_t message) -> auto& { return all[static_cast<std::size_t>(3 * other + message)]; };
        for (index_t other = 0; other < size; ++other)
            for (const index_t message : {2, 0, 1}) // 2 has a tag of its own
                requests.push_back(ranks.receive(other, message / 2 * 32767, std::as_writable_bytes(std::span(at(received, other, message)))));
        for (index_t other = size; other-- > 0;)
            for (index_t message = 0; message < 3; ++message)
                requests.push_back(ranks.send(other, message / 2 * 32767, std::as_bytes(std::span(at(sent, other, message)))));
        for (index_t tried = 0; tried < 10 && !ranks.test(requests.back()); ++tried) {}
        for (auto& request : requests) ranks.wait(request);
        for (auto& request : requests) require(ranks.test(request), "what has been waited for is done");
        for (index_t other = 0; other < size; ++other)
            for (index_t message = 0; message < 3; ++message)
                require(at(received, other, message) == numbers_of(other, rank, count + message), "messages arrive whole and in order");
    }
    for (const std::size_t bytes : {1u, 3u, 100u}) {
        std::vector<std::byte> own(bytes, static_cast<std::byte>(7 * rank + 1));
        own.front() = static_cast<std::byte>(rank);
        const auto all = detail::all_gather(ranks, std::span<const std::byte>(own));
        require(std::ssize(all) == size * std::ssize(own), "all_gather has what all gave");
        for (std::size_t r = 0; r < static_cast<std::size_t>(size); ++r)
            require(all[r * bytes] == static_cast<std::byte>(r) && (bytes == 1 || all[r * bytes + bytes - 1] == static_cast<std::byte>(7 * r + 1)),
                    "all_gather is in the order of ranks");
    }
    for (index_t root = 0; root < size; ++root) {
        auto bytes = numbers_of(rank, root, 50);
        detail::broadcast(ranks, root, std::as_writable_bytes(std::span(bytes)));
        require(bytes == numbers_of(root, root, 50), "broadcast gives all what the root has");
    }
}

} // namespace attn::testing
