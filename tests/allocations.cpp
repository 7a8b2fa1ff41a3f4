#include "allocations.hpp"

#include <atomic>
#include <cerrno>

namespace {

std::atomic<std::size_t> count = 0, sum = 0;

} // namespace

std::size_t attn::testing::allocations() { return count; }
std::size_t attn::testing::allocated_bytes() { return sum; }

#ifdef ATTN_COUNTS_ALLOCATIONS

extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) noexcept {
    ++count, sum += bytes;
    return __libc_malloc(bytes);
}
void* calloc(std::size_t n, std::size_t bytes) noexcept {
    ++count, sum += n * bytes;
    return __libc_calloc(n, bytes);
}
void* realloc(void* p, std::size_t bytes) noexcept {
    ++count, sum += bytes;
    return __libc_realloc(p, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
    ++count, sum += bytes;
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** p, std::size_t alignment, std::size_t bytes) noexcept {
    ++count, sum += bytes;
    *p = __libc_memalign(alignment, bytes);
    return *p ? 0 : ENOMEM;
}

} // extern "C"

#endif
