// Softmax attention that leaves it to the hardware what is read next. Its kernels are compiled apart, since a macro says so, and its types are others.
#pragma once

#include <cstdint>

namespace attn::bench {

enum class seen_keys { all, past, within_128 };

/// Contiguous tensors [batch][heads][tokens][channels] of a call on one thread, whose queries and keys begin beside each other.
struct plain_call {
    seen_keys pattern;
    std::int64_t batch, heads, kv_heads, queries, keys, key_dim, value_dim;
    const float *q, *k, *v;
    float* out;
};

void attend_without_prefetch(const plain_call&);

} // namespace attn::bench
