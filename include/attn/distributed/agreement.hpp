// What ranks tell each other before they send anything else, and when they are done: whether all are well, and call the same.
#pragma once

#include "communicator.hpp"

#include <array>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// A number that all ranks must have alike, and what errors call it.
using agreed_number = std::pair<const char*, index_t>;

/// What one rank says; of one size, whatever is called.
struct rank_report {
    index_t failed = 0;
    std::array<index_t, 30> numbers{};
    std::array<char, 264> reason{}; ///< of a failure
};

inline std::string reason_of(const std::exception_ptr& failure) {
    try {
        std::rethrow_exception(failure);
    } catch (const std::exception& error) { return error.what(); } catch (...) {
        return "an exception that is no std::exception";
    }
}

/// Returns on all ranks, or throws on all: its own failure, if there is one; rank_error if another rank has one; argument_error if ranks
/// differ in a number.
template <Communicator C>
void agree(C& ranks, std::string_view operation, const std::exception_ptr& failure, std::initializer_list<agreed_number> numbers = {}) {
    rank_report own;
    std::transform(numbers.begin(), numbers.end(), own.numbers.begin(), [](const auto& number) { return number.second; });
    if (failure) {
        own.failed = 1;
        const auto reason = reason_of(failure);
        std::copy_n(reason.data(), std::min(reason.size(), own.reason.size() - 1), own.reason.begin());
    }
    const auto bytes = all_gather(ranks, std::as_bytes(std::span(&own, 1)));
    std::vector<rank_report> all(bytes.size() / sizeof own);
    std::memcpy(all.data(), bytes.data(), bytes.size());
    if (failure) std::rethrow_exception(failure);
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r].failed)
            throw rank_error(std::string(operation) + ": rank " + std::to_string(r) + " has failed: " + all[r].reason.data());
    for (std::size_t i = 0; i < numbers.size(); ++i)
        for (std::size_t r = 1; r < all.size(); ++r)
            if (all[r].numbers[i] != all[0].numbers[i])
                throw argument_error(operation, "ranks", "0 and ", r, " differ in ", numbers.begin()[i].first, ": ", all[0].numbers[i],
                                     " and ", all[r].numbers[i]);
}

/// What f throws, if anything.
template <class F>
std::exception_ptr failure_of(const F& f) {
    try {
        f();
    } catch (...) { return std::current_exception(); }
    return nullptr;
}

} // namespace attn::detail
