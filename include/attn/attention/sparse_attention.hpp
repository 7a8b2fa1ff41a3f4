// The sparse patterns of the papers by name, for softmax_attention and talking_heads_attention alike.
#pragma once

#include "../pattern/causal.hpp"
#include "../pattern/fixed.hpp"
#include "../pattern/global.hpp"
#include "../pattern/local.hpp"
#include "../pattern/on_heads.hpp"
#include "../pattern/strided.hpp"

#include <limits>
#include <string>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// The last `keys` keys, as a pattern of that name asks for them. Throws argument_error where there are none.
constexpr pattern::local last_keys(index_t keys, const char* pattern, const char* argument) {
    if (keys < 1) detail::raise(argument_error(pattern, argument, "is " + std::to_string(keys) + ", but 1 at least is needed"));
    return {keys - 1, 0};
}

} // namespace attn::detail

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Each is a pattern, to be used as it is or combined further:
///     softmax_attention{.pattern = sparse_transformer_strided(128)}
///     softmax_attention{.pattern = sparse_transformer_strided(128) & lengths{present}}
/// The kernel visits a key that several parts show once. Where parts have different steps, as a window and a stride have, it runs one
/// pass for each and merges their results; two numbers a row pass between them.

/// The last `context` keys, the query's own included: i - context < j <= i. O(n context) pairs. A context below 1 is refused.
/// Jiang et al. 2023, Mistral 7B; OpenAI's "local" attention (Child et al. 2019).
constexpr auto sliding_window(index_t context) { return causal{} & detail::last_keys(context, "sliding_window", "context"); }

/// Sparse Transformer, strided: j <= i, and i - j < stride or i = j (mod stride). O(n (stride + n / stride)) pairs, so O(n sqrt n) for a
/// stride near sqrt n. A stride below 1 is refused. Child et al. 2019, Generating Long Sequences with Sparse Transformers.
constexpr auto sparse_transformer_strided(index_t stride) {
    return causal{} & (detail::last_keys(stride, "sparse_transformer_strided", "stride") | strided{stride});
}

/// Sparse Transformer, strided, as separate heads: heads below `local_heads` see the window, the others the stride. O(n stride) and
/// O(n^2 / stride) pairs.
/// Refused: a stride below 1, local_heads below 0. Child et al. 2019, section 5.1 and OpenAI's code.
constexpr auto sparse_transformer_strided_heads(index_t stride, index_t local_heads) {
    constexpr index_t any_more = std::numeric_limits<index_t>::max();
    return causal{} & ((on_heads{0, local_heads} & detail::last_keys(stride, "sparse_transformer_strided_heads", "stride")) |
                       (on_heads{local_heads, any_more} & strided{stride}));
}

/// Sparse Transformer, fixed: j <= i, and j is in the block of i or in the last `width` columns of its own block. O(n (block + n width /
/// block)) pairs. Refused: block or width below 1, more columns than the block has. Child et al. 2019.
constexpr auto sparse_transformer_fixed(index_t block, index_t width) { return causal{} & fixed{block, width}; }

/// Sparse Transformer in both directions: abs(i - j) <= window, or i = j (mod stride). O(n (2 window + n / stride)) pairs. Refused: a
/// window below 0, a stride below 1. Su 2019 (https://kexue.fm/archives/6853).
constexpr auto sparse_transformer_symmetric(index_t window, index_t stride) { return local{window} | strided{stride}; }

/// Longformer: abs(i - j) <= window, or one of the two is among the first `tokens`, which see all and are seen by all. O(n (2 window +
/// 2 tokens)) pairs. Refused: a window or tokens below 0. Beltagy et al. 2020, Longformer: The Long-Document Transformer.
constexpr auto longformer(index_t window, index_t tokens) { return local{window} | global{tokens}; }

/// Sparse Transformer, fixed, in which head h summarises by the (h mod sub_blocks)-th columns from the end of the block instead of all
/// heads by the same: block - (u + 1) width <= j mod block < block - u width for u = h mod sub_blocks. Refused: block, width or
/// sub_blocks below 1, more columns than the block has. Child et al. 2019, section 4.3: "distinct subblocks" for different heads.
struct sparse_transformer_fixed_heads {
    index_t block;
    index_t width;
    index_t sub_blocks;

    constexpr auto at(index_t, index_t head) const { return causal{} & fixed{block, width, head % sub_blocks}; }

    void check(const pattern_context& context) const {
        context.require_at_least(1, sub_blocks, [&] { return std::string("sparse_transformer_fixed_heads"); }, "sub_blocks");
        fixed{block, width, sub_blocks - 1}.check(context);
    }
};

} // namespace attn::pattern

namespace attn::inline ATTN_INSTRUCTION_SET {

using pattern::sliding_window, pattern::sparse_transformer_strided, pattern::sparse_transformer_strided_heads,
    pattern::sparse_transformer_fixed, pattern::sparse_transformer_fixed_heads, pattern::sparse_transformer_symmetric, pattern::longformer;

} // namespace attn
