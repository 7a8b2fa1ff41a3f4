// Sparse patterns at the sizes that papers and goals name, as cases that only the benchmark knows.
#pragma once

#include "cases/case.hpp"

namespace attn::bench {

/// Cases of softmax attention in float: local_128 (128 keys on both sides), sliding_window_256 (causal), strided_64, the Sparse Transformer's three forms with its
/// stride of 128 (the fixed form with the last 8 of a block), and windows of 7 x 7 tokens of a 56 x 56 grid with a bias of each
/// head for each pair, as they are and shifted by 3 x 3; neighborhood_7 and neighborhood_13 (a grid of 56 x 56
/// in tiles of 4 x 4); selected_16_of_64 (causal, 16 blocks of 64 keys for each block of 64 queries, of 16384 tokens);
/// single_keys_512 and _2048 (so many keys for each query, drawn one by one); and documents_37, _128
/// and _512 (packed, causal in each), block_diagonal_64, block_sparse_64 and _28 (half of the blocks), dilated_window_128_3 and _28_3,
/// longformer_128_16, fixed_256 (the Sparse Transformer's, with the last 8 of a block); and softmax_bf16_products.
const std::vector<testing::attention_case>& pattern_cases();

} // namespace attn::bench
