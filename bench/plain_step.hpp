// A step of decoding as one writes it in an afternoon.
#pragma once

#include <cstddef>

namespace attn::bench {

/// out = softmax(q k^T / sqrt(channels)) v of one query for each head: q and out (heads, channels), k and v (heads, keys, channels); scores is
/// memory for keys. Plain loops, which plain_step.cpp is compiled with -Ofast for.
void plain_step(const float* q, const float* k, const float* v, std::ptrdiff_t heads, std::ptrdiff_t keys, std::ptrdiff_t channels,
                float* scores, float* out);

} // namespace attn::bench
