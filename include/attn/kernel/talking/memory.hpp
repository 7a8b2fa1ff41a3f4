// What one thread of talking-heads attention keeps in memory: a panel of queries and a block of keys in all heads.
#pragma once

#include "../softmax/query_block.hpp"
#include "../softmax/softmax_state.hpp"
#include "head_mixing.hpp"

#include <array>
#include <bit>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the steps of talking-heads attention share. A mixing without columns is absent.
template <Scalar T, class Arch>
struct talking_heads_mixings {
    head_mixing<T, Arch> logits, weights;
    bool has_weights_bias = false;
};

/// How many heads there are, of how many channels, and the keys that a panel walks in blocks.
struct talking_heads_shape {
    index query_heads, heads, value_heads;
    index key_channels, value_channels;
    index keys;
    bool mixes_logits, mixes_weights;
};

/// A block of keys: their weights in every head, and what was known when these were computed.
template <Scalar T>
struct weight_block {
    key_run keys;
    T* weights;          ///< [heads][keys of a block][queries] e^(score - maximum)
    T* maximum;          ///< [heads][queries] the largest score up to this block
    std::uint64_t* seen; ///< [keys] one bit per query: whether any head sees the key
    bool all_seen;       ///< then `seen` is not filled in
};

/// Between which keys of a block each query sees some.
template <index Queries>
class seen_keys {
public:
    template <Scalar T>
    void find(const weight_block<T>& block) {
        first_.fill(block.keys.count);
        end_.fill(0);
        const auto walk = [&](index j, std::uint64_t& known, auto& of_query, index value) {
            for (auto newly = block.seen[j] & ~known; newly != 0; newly &= newly - 1)
                of_query[static_cast<std::size_t>(std::countr_zero(newly))] = value;
            known |= block.seen[j];
        };
        std::uint64_t from_first = 0, from_last = 0;
        for (index j = 0; j < block.keys.count; ++j) walk(j, from_first, first_, j);
        for (index j = block.keys.count; j-- > 0;) walk(j, from_last, end_, j + 1);
    }
    /// For some queries together: the first key that any of them sees, and the one after the last.
    std::pair<index, index> of(index query, index count) const {
        return {*std::min_element(first_.data() + query, first_.data() + query + count),
                *std::max_element(end_.data() + query, end_.data() + query + count)};
    }

private:
    std::array<index, static_cast<std::size_t>(Queries)> first_{}, end_{};
};

/// The arrays of one panel. keeps_weights: those of all keys stay in memory, else there is room for one block's.
template <Scalar T, class Arch>
struct talking_heads_memory {
    static constexpr index lane_count = simd::lanes<T, Arch>::size;
    /// Queries of a panel in registers: so few that the scores of all heads for a block of keys stay in the second-level cache.
    static constexpr index most_queries = query_block_traits<T, Arch>::usual_registers * lane_count;
    /// Keys of a block, whose borders are absolute.
    static constexpr index keys_of_block = 64;

    index heads;
    index block_keys;         ///< at most so many in a block
    index head_stride;        ///< numbers from one head of a block to the next
    index key_padded, padded; ///< channels of keys and of values, in whole registers
    index blocks;             ///< whose weights are in memory at a time
    index next_block;         ///< numbers from the weights of a block to those of the next, 0 where that takes the same memory

    T* logits;                       ///< [query_heads][keys of a block][queries] before the first mixing
    T* mixed;                        ///< [value_heads][keys of a block][queries] after the second
    T* packed;                       ///< [keys of a block] rows that cannot be read in place
    T* queries;                      ///< [query_heads][channels][queries]
    T* values;                       ///< [value_heads][queries][padded] the sums
    T* factor;                       ///< [heads][queries] one over the sum of the weights
    T* last_maximum;                 ///< [heads][queries] the largest score of all
    T* share;                        ///< [heads][queries] by which the weights of a block are multiplied in the end
    T* maximum;                      ///< [blocks][heads][queries] the largest score up to a block
    T* weights;                      ///< [blocks][heads][keys of a block][queries]
    std::uint64_t* seen;             ///< [blocks][keys of a block]
    softmax_state<T, Arch>* states;  ///< [heads] without values

    talking_heads_memory(detail::scratch& memory, const talking_heads_shape& s, bool keeps_weights)
        : heads(s.heads), block_keys(std::clamp<index>(s.keys, 1, keys_of_block)),
          // The mixings read all heads at once: one row more than there are keys, so that they do not lie a multiple of 4 KiB apart, in
          // the same sets of the first-level cache.
          head_stride((block_keys + 1) * most_queries), key_padded(whole_registers<T, Arch>(s.key_channels)),
          padded(whole_registers<T, Arch>(s.value_channels)),
          blocks(keeps_weights ? (s.keys + keys_of_block - 2) / keys_of_block + 1 : 1),
          next_block(blocks > 1 ? detail::product(heads, head_stride) : 0), logits(memory.take<T>(s.mixes_logits ? s.query_heads : 0, head_stride)),
          mixed(memory.take<T>(s.mixes_weights ? s.value_heads : 0, head_stride)),
          packed(memory.take<T>(block_keys * std::max(key_padded, padded))),
          queries(memory.take<T>(s.query_heads, most_queries, s.key_channels)),
          values(memory.take<T>(s.value_heads, most_queries, padded)), factor(memory.take<T>(heads * most_queries)),
          last_maximum(memory.take<T>(heads * most_queries)), share(memory.take<T>(s.mixes_weights ? heads * most_queries : 0)),
          maximum(memory.take<T>(blocks, heads, most_queries)), weights(memory.take<T>(blocks, heads, head_stride)),
          seen(memory.take<std::uint64_t>(blocks * block_keys)), states(memory.take<softmax_state<T, Arch>>(heads)) {
        for (index c = 0; c < heads; ++c) {
            const auto state = softmax_state<T, Arch>::take(memory, most_queries, 0);
            if (states) states[c] = state;
        }
    }

    /// Block number n. Where weights are not kept, all blocks share the same memory.
    weight_block<T> block(index n, const key_run& keys, bool all_seen) const {
        const auto slot = blocks > 1 ? n : 0;
        return {keys, weights + slot * heads * head_stride, maximum + slot * heads * most_queries, seen + slot * block_keys, all_seen};
    }
};

} // namespace attn::kernel
