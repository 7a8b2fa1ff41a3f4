// The fixed pattern of sparse transformers.
#pragma once

#include "block_diagonal.hpp"
#include "narrowed.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Blocks that see themselves and the summary columns of every block: floor(i / block) == floor(j / block), or
///     block - (sub + 1) width <= j mod block < block - sub width,
/// the last `width` columns of each block, or for sub = 1, 2, ... (a head's sub-block) the `width` before those. O(n (block + n width /
/// block)) pairs. The paper's form is causal{} & fixed{block, width}. Refused: block, width < 1, sub < 0, columns beyond the block.
/// Child et al. 2019, Generating Long Sequences with Sparse Transformers, and OpenAI's code for it.
struct fixed {
    index_t block;
    index_t width;
    index_t sub = 0;

    /// The summary columns, which all queries see.
    struct summary {
        index_t begin; ///< columns of a block from here
        index_t end;   ///< up to here
        index_t block; ///< how many a block has

        /// Whether a key is one of the columns.
        constexpr auto visible(const auto&, const auto& j) const {
            const auto column = floor_mod(j, block);
            return column >= begin && column < end;
        }
    };

    constexpr auto visible(const auto& i, const auto& j) const { return parts().visible(i, j); }
    /// A box in another block than its queries need not divide these.
    friend constexpr auto narrowed(const fixed& p, const position_range& queries, const position_range& keys) {
        return attn::narrowed(p.parts(), queries, keys);
    }

    void check(const pattern_context& context) const {
        const auto name = detail::named("fixed", block, width, sub);
        context.require_at_least(1, block, name, "block");
        context.require_at_least(1, width, name, "width");
        context.require_at_least(0, sub, name, "sub-block");
        if (sub >= block / width) context.refuse(name(), "has its summary columns outside the block");
    }

private:
    constexpr either<block_diagonal, summary> parts() const { return {{block}, {block - (sub + 1) * width, block - sub * width, block}}; }
};

} // namespace attn::pattern
