// What a gradient of talking-heads attention is made of, and what one thread of it keeps in memory: a query block and a key block in all
// heads, and sums.
#pragma once

#include "../../core/gradients.hpp"
#include "../attend/visible_keys.hpp"
#include "../backward/gradient_tile.hpp"
#include "../backward/score_slopes.hpp"
#include "../backward/summed_rows.hpp"
#include "memory.hpp"
#include "head_products.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a gradient of talking-heads attention is made of.
template <Scalar T>
struct talking_gradient_call {
    const inputs<T>& in;
    const saved_outputs<T>& saved;
    const output_gradients<T>& d_out;
    const mixed_head_gradients<T>& wanted;
    talking_heads_shape shape;
    const visible_keys& pattern;
    const score_slopes<T>* slopes; ///< none if scores stay as they are
    const talking_heads_parameters& with;
    const head_mixings<T>&mix, &back; ///< as forward mixes, and their transposes, which gradients go through
    bool sums_weights;                ///< D is summed over the keys, or else comes of the saved output
    T *share, *delta;                 ///< of each row (batch, heads, n) what multiplies its weights, and dZ - D
};

/// Some query blocks, and some key rows.
struct talking_gradient_task {
    index_t batch, step; ///< the step of the entry's query blocks
    index_t first_block, end_block;
    row_range keys;
};

/// Where some queries' sums for the gradients of the mixings go; null where none are wanted.
struct mixing_sums {
    double *logits_mix = nullptr, *logits_bias = nullptr, *weights_mix = nullptr, *weights_bias = nullptr;
};

/// Tiles are [heads][keys of a block][queries].
template <Scalar T>
struct talking_gradient_memory {
    static constexpr auto max_queries = talking_heads_memory<T>::max_queries;
    static constexpr auto keys_of_block = talking_heads_memory<T>::keys_of_block;

    index_t block_keys, head_stride, key_stride, value_stride;

    T* logits;                         ///< before the first mixing; then the gradients by them
    T* scores;                         ///< behind it, then weights: the same memory if there is none
    T* of_mixed;                       ///< the gradients by the weights behind the second mixing; then these weights
    T* of_scores;                      ///< the gradients by the weights before it, then by scores: the same memory if there is none
    T* slopes;                         ///< of the score function
    T* scratch;                        ///< [keys of a block, in whole registers][queries]
    T* sums;                           ///< [heads][queries] of P dP
    T* totals;                         ///< the same of P
    T *query_rows, *d_out_rows;        ///< [heads][queries][channels in whole registers]
    T* of_queries;                     ///< sums [heads][queries][channels in whole registers]
    summed_rows<T> of_keys, of_values; ///< of the block of keys, in one head
    gradient_rows<T>* rows;            ///< [heads]
    std::uint64_t* seen;               ///< [keys of a block] one bit per query: whether any head sees the key
    std::uint64_t* visible;            ///< the same of each head, or of one if they see the same
    block_reader<T> keys, values;
    score_stage<T>*queries, *d_out; ///< of each head

    talking_gradient_memory(detail::scratch& memory, const talking_heads_shape& s)
        : block_keys(std::clamp<index_t>(s.keys, 1, keys_of_block)),
          head_stride((block_keys + 1) * max_queries), // as in talking_heads_memory
          key_stride(whole_registers<T>(s.key_channels)), value_stride(whole_registers<T>(s.value_channels)),
          logits(memory.take<T>(s.query_heads, head_stride)), scores(s.mixes_logits ? memory.take<T>(s.heads, head_stride) : logits),
          of_mixed(memory.take<T>(s.value_heads, head_stride)),
          of_scores(s.mixes_weights ? memory.take<T>(s.heads, head_stride) : of_mixed),
          slopes(memory.take<T>(s.scored ? s.heads : 0, head_stride)), scratch(memory.take<T>(whole_registers<T>(block_keys), max_queries)),
          sums(memory.take<T>(s.heads, max_queries)), totals(memory.take<T>(s.heads, max_queries)),
          query_rows(memory.take<T>(s.query_heads, max_queries, key_stride)),
          d_out_rows(memory.take<T>(s.value_heads, max_queries, value_stride)),
          of_queries(memory.take<T>(s.query_heads, max_queries, key_stride)), of_keys(memory, block_keys, s.key_channels),
          of_values(memory, block_keys, s.value_channels), rows(memory.take<gradient_rows<T>>(s.heads)),
          seen(memory.take<std::uint64_t>(block_keys)), visible(memory.take<std::uint64_t>(s.heads_alike ? 1 : s.heads, block_keys)),
          keys(memory, block_keys, s.key_channels, true), values(memory, block_keys, s.value_channels, false),
          queries(memory.take<score_stage<T>>(s.query_heads)), d_out(memory.take<score_stage<T>>(s.value_heads)) {
        const auto construct = [&](score_stage<T>* at, index_t heads, index_t channels) {
            for (index_t h = 0; h < heads; ++h) {
                const score_stage<T> stage(memory, channels);
                if (at) std::construct_at(at + h, stage);
            }
        };
        construct(queries, s.query_heads, s.key_channels);
        construct(d_out, s.value_heads, s.value_channels);
    }
};

} // namespace attn::kernel
