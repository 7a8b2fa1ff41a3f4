// How fast this machine reads memory: what the bandwidth of rows that memory bounds is a share of.
#pragma once

#include "attn/parallel/thread_pool.hpp"

namespace attn::bench {

/// Bytes a second of summing numbers from memory that no cache holds, on all threads of the pool: the best of a few readings of a
/// quarter of a gigabyte.
double read_bandwidth(thread_pool& threads);

} // namespace attn::bench
