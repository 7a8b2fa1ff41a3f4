#pragma once

#include "../core/tensor_view.hpp"
#include "bit_table.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// A bool matrix over blocks of queries and keys: blocks(floor(i / query_block), floor(j / key_block)). The blocks are the caller's
/// memory, (entries, heads or 1, query blocks, key blocks), entry b mod entries for batch entry b. Refused: a block below one, blocks
/// without memory, positions that they do not cover.
/// DeepSpeed Sparse Attention; Zaheer et al. 2020, BigBird.
struct block_sparse {
    static constexpr bool compares_positions = false;
    tensor_view<const bool> blocks;
    index_t query_block;
    index_t key_block = query_block;

    constexpr auto at(index_t batch, index_t head) const {
        const auto& size = blocks.shape();
        const detail::table_place at(size, batch, head);
        return block_plane{blocks.row(at.entry, at.head, 0), blocks.strides().tokens, blocks.strides().channels, query_block, key_block};
    }

    constexpr bool heads_alike() const { return blocks.shape().heads == 1; }

    void check(const pattern_context& context) const {
        const auto& size = blocks.shape();
        const auto name = detail::named("block_sparse", size, query_block, key_block);
        context.require_at_least(1, query_block, name, "query block");
        context.require_at_least(1, key_block, name, "key block");
        if (const auto problem = detail::problem_of(blocks); !problem.empty()) context.refuse(name(), problem);
        context.require_broadcast(size, name);
        context.require_inside(0, detail::product(size.tokens, query_block), 0, detail::product(size.channels, key_block), name);
    }
    void check_apart(const output_memory& out) const { out.require_apart("the blocks of the pattern", blocks); }

private:
    /// The blocks of one batch entry and head.
    struct block_plane {
        const bool* blocks;
        index_t row_stride, column_stride, query_block, key_block;

        constexpr bool block(index_t row, index_t column) const { return blocks[row * row_stride + column * column_stride]; }
        constexpr bool visible(index_t i, index_t j) const { return block(i / query_block, j / key_block); }
        constexpr visibility visible(const position_range& i, const position_range& j) const {
            const auto rows = floor_div(i, query_block), columns = floor_div(j, key_block);
            const bool seen = block(rows.first, columns.first);
            for (auto row = rows.first; row <= rows.last; ++row)
                for (auto column = columns.first; column <= columns.last; ++column)
                    if (block(row, column) != seen) return visibility::some;
            return seen;
        }
        constexpr auto visible(const QueryLanes auto& i, index_t j) const {
            return detail::mask_of_blocks(i, query_block, [&](index_t row) { return visible(row * query_block, j); });
        }
    };
};

} // namespace attn::pattern
