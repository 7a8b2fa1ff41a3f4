// A query block: the rows that one task computes together, as lanes and as positions.
#pragma once

#include "../../core/inputs.hpp"
#include "../../pattern/schedule.hpp"
#include "../../simd/positions.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Bits first .. first + count - 1.
constexpr std::uint64_t bit_range(index_t first, index_t count) { return simd::lane_bits::first(count).value << first; }
/// One past the last bit that is set.
constexpr index_t bit_end(std::uint64_t bits) { return 64 - std::countl_zero(bits); }

/// Rows of a block at most: one bit for each fits a word.
inline constexpr index_t max_block_rows = 64;
/// Query blocks whose visible keys a thread keeps, for heads that see the same.
inline constexpr index_t kept_masks = 4;

/// Rows of softmax attention in lanes: the queries `tokens` of some heads of one batch entry that share their keys, head after head. Row r
/// is token r % tokens.count of head first_head + r / tokens.count. More than one head come together where the tokens of one are few.
struct query_block {
    index_t batch = 0, first_head = 0, heads = 1, kv_head = 0;
    query_tile tokens{};
    index_t first_row = 0;     ///< of the first token, in the tensors; the others follow in steps of tokens.step
    index_t masks = 0;         ///< the place, less than kept_masks, where its visible keys are kept
    bool shares_masks = false; ///< another head's block has put them there

    /// The rows of one head.
    query_block of_head(index_t head) const { return {.batch = batch, .first_head = head, .tokens = tokens, .first_row = first_row}; }
    index_t rows() const { return heads * tokens.count; }
    index_t head_of(index_t row) const { return first_head + row / tokens.count; }
    index_t token_of(index_t row) const { return first_row + row % tokens.count * tokens.step; }
};

/// How many rows a block may have, with any instruction set: so many that queries, scores and results stay in the nearest caches. A few
/// more where that makes one block of all, so that a window of 49 reads its keys but once; and where products are not of numbers but of
/// operands E, which are made of the keys for each block anew.
template <Scalar T, class E = T>
struct query_block_traits {
    static constexpr index_t lane_count = simd::lanes<T>::size;
    static constexpr index_t max_registers = 256 / (lane_count * static_cast<index_t>(sizeof(T)));
    static constexpr index_t usual_registers = std::same_as<E, T> ? max_registers * 3 / 4 : max_registers;
    static constexpr index_t max_rows = max_registers * lane_count;
    static constexpr index_t unit =
        64 / sizeof(T); ///< what the rows of gradients' blocks are multiples of: sums over them keep their order
    static_assert(max_rows <= max_block_rows);

    /// The rows of a block of so many queries that are there.
    static constexpr index_t rows_of(index_t queries) { return (queries <= max_rows ? max_registers : usual_registers) * lane_count; }
};

/// The positions of `Size` lanes, lane `lane` of which is the first token; those beyond the last are padding.
template <Scalar T, int Size>
simd::query_lanes<T, Size> positions_of(const query_tile& tokens, index_t lane = 0) {
    simd::query_lanes<T, Size> result;
    result.first = tokens.first - lane * tokens.step;
    result.step = tokens.step;
    result.count = static_cast<int>(std::min<index_t>(Size, tokens.count + lane));
    return result;
}

} // namespace attn::kernel
