// How often the program has asked for memory, and for how much: for tests of code that must not.
#pragma once

#include <cstddef>
#include <cstdlib>

// Counted by standing in for glibc's malloc, which everything ends in: operator new, std::function, Eigen. The sanitisers do the
// same for their own purposes, so there (and on other C libraries) nothing is counted.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTN_COUNTS_ALLOCATIONS 1
#endif
#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#undef ATTN_COUNTS_ALLOCATIONS
#endif
#endif

namespace attn::testing {

/// Allocations so far, by all threads; always 0 where they are not counted.
std::size_t allocations();
/// The bytes that were asked for so far, likewise; what was given back is not taken off.
std::size_t allocated_bytes();

/// Allocations while the callable runs, by all threads.
template <class F>
std::size_t allocations_in(F&& f) {
    const auto before = allocations();
    f();
    return allocations() - before;
}
/// The bytes that are asked for while the callable runs, by all threads.
template <class F>
std::size_t bytes_allocated_in(F&& f) {
    const auto before = allocated_bytes();
    f();
    return allocated_bytes() - before;
}

} // namespace attn::testing
