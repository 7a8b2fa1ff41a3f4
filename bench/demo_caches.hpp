// The words of a text one by one, beside a cache.
#pragma once

#include "attn/core/tensor.hpp"

#include <string>
#include <vector>

namespace attn::bench {

/// A heading, and a row for each kind of cache: what a word takes, what the cache takes after the last, and how far the results are from those
/// of one call with all words, x (1, heads, n, channels) being queries, keys and values.
std::vector<std::vector<std::string>> cache_table(const tensor<float>& x);

} // namespace attn::bench
