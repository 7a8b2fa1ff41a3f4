// Softmax attention over ranks that are threads, as cases that only the benchmark knows.
#pragma once

#include "cases/case.hpp"

namespace attn::bench {

/// Cases in float: window_1024 (causal, 1024 keys back), and softmax, softmax_causal and window_1024 over ranks, `softmax_over_2_ranks`. Ranks and their
/// threads, one for each, are there before the first call, with the partition; a call is that of sequence_parallel on all ranks, from the first that
/// begins to the last that is done.
const std::vector<testing::attention_case>& rank_cases();

/// What the cases are called: that over so many ranks, or on one machine over 0.
std::string rank_case_name(const std::string& name, index_t ranks);

} // namespace attn::bench
