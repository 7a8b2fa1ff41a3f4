// What one thread of talking-heads attention keeps in memory: a query block and a key block in all heads.
#pragma once

#include "../attend/key_reader.hpp"
#include "../attend/score_stage.hpp"
#include "../attend/softmax_state.hpp"
#include "../attend/visit.hpp"
#include "head_mixing.hpp"

#include <memory>
#include <numeric>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the rows of the heads of a query block see of a run: visible [heads, or 1 if they see the same][block_keys], and `seen` of any of
/// them, [block_keys]. How many keys there are up to the last that any row sees.
inline index_t find_visible_heads(const visible_keys& pattern, const query_block& queries, const key_run& keys, bool heads_alike,
                                  index_t block_keys, std::uint64_t* visible, std::uint64_t* seen) {
    std::fill_n(seen, keys.count, 0);
    for (index_t h = 0; h < (heads_alike ? std::min<index_t>(1, queries.heads) : queries.heads); ++h, visible += block_keys) {
        if (keys.full) std::fill_n(visible, keys.count, bit_range(0, queries.tokens.count));
        else pattern.find(queries.of_head(queries.first_head + h), visible_keys::whole, keys, visible);
        for (index_t j = 0; j < keys.count; ++j) seen[j] |= visible[j];
    }
    auto count = keys.count;
    while (count > 0 && seen[count - 1] == 0) --count;
    return count;
}

/// seen[keys]: which queries a key counts for: those whose score is not -infinity in every head. scores: [heads][keys][queries], whole
/// registers of these. Whether every key counts for all.
template <Scalar T>
bool find_seen(const T* scores, index_t heads, index_t head_stride, index_t keys, index_t queries, std::uint64_t* seen) {
    bool all = true;
    for (index_t j = 0; j < keys; ++j) {
        seen[j] = 0;
        for (index_t c = 0; c < heads; ++c) seen[j] |= rows_not_hidden<T>(scores + c * head_stride + j * queries, queries);
        all = all && seen[j] == bit_range(0, queries);
    }
    return all;
}

/// How many heads there are, of how many channels, how many keys, and what happens to a score.
struct talking_heads_shape {
    index_t query_heads, heads, value_heads;
    index_t key_channels, value_channels;
    index_t keys;
    bool mixes_logits, mixes_weights;
    bool heads_alike; ///< all mixed heads have the same pattern
    bool scored;      ///< by a function
};

/// What an operator is made of, as in talking_heads_attention.
struct talking_heads_parameters {
    double scale;
    std::span<const double> sinks;
    tensor_view<const double> logits_mix;
    std::span<const double> logits_bias;
    tensor_view<const double> weights_mix;
    std::span<const double> weights_bias;
    bool heads_alike; ///< all mixed heads have the same pattern
    bool scored;      ///< by a function

    /// How many heads and channels there are of everything.
    talking_heads_shape shape_of(const input_shapes& s) const {
        const bool mixes_logits = logits_mix.data(), mixes_weights = weights_mix.data();
        const auto heads = mixes_logits ? logits_mix.shape().tokens : s.queries.heads;
        return {.query_heads = s.queries.heads,
                .heads = heads,
                .value_heads = mixes_weights ? weights_mix.shape().tokens : heads,
                .key_channels = s.queries.channels,
                .value_channels = s.values.channels,
                .keys = s.keys.tokens,
                .mixes_logits = mixes_logits,
                .mixes_weights = mixes_weights,
                .heads_alike = heads_alike,
                .scored = scored};
    }
};

/// The step of the query blocks of a batch entry, which the patterns of all mixed heads promise.
inline index_t common_step(const visible_keys& pattern, const talking_heads_shape& s, index_t batch) {
    index_t step = 0;
    for (index_t c = 0; c < (s.heads_alike ? 1 : s.heads); ++c) step = std::gcd(step, pattern.step(batch, c, visible_keys::whole));
    return std::max<index_t>(step, 1);
}

/// The mixings of a call; or, if is_back, their transposes, by which gradients go from the mixed heads to the others.
template <Scalar T>
struct head_mixings {
    bool is_back;
    head_mixing<T> logits, weights;

    head_mixings(detail::scratch& memory, const talking_heads_shape& s, bool back = false)
        : is_back(back), logits(take(memory, s.mixes_logits, s.heads, s.query_heads)),
          weights(take(memory, s.mixes_weights, s.value_heads, s.heads)) {}
    void load(const talking_heads_parameters& with) {
        const auto load_one = [&](head_mixing<T>& to, const tensor_view<const double>& mix, std::span<const double> bias) {
            if (mix.data()) is_back ? to.load(mix.transposed(), {}) : to.load(mix, bias);
        };
        load_one(logits, with.logits_mix, with.logits_bias);
        load_one(weights, with.weights_mix, with.weights_bias);
    }

private:
    head_mixing<T> take(detail::scratch& memory, bool mixes, index_t rows, index_t columns) const {
        if (is_back) std::swap(rows, columns);
        return {memory, mixes ? rows : 0, mixes ? columns : 0};
    }
};

/// A key block: its weights in every head, and what was known when these were computed.
template <Scalar T>
struct weight_block {
    key_run keys;
    T* weights;          ///< [heads][keys of a block][queries] e^(score - maximum)
    T* maximum;          ///< [heads][queries] the largest score up to this block
    std::uint64_t* seen; ///< [keys] one bit per query: whether any head sees the key
    bool all_seen;       ///< then `seen` is not filled in

    const std::uint64_t* visible() const { return all_seen ? nullptr : seen; }
};

/// The arrays of one query block. keeps_weights: those of all keys stay in memory, else there is room for one block's.
template <Scalar T>
struct talking_heads_memory {
    using state_type = softmax_state<T>;
    static constexpr index_t lane_count = simd::lanes<T>::size;
    /// The most queries of a block: so few that the scores of all heads for a block of keys stay in the second-level cache.
    static constexpr index_t max_queries = query_block_traits<T>::usual_registers * lane_count;
    /// Keys of a block, whose borders are absolute.
    static constexpr index_t keys_of_block = 64;

    index_t heads;
    index_t block_keys;  ///< at most so many in a block
    index_t head_stride; ///< numbers from one head of a block to the next
    index_t blocks;      ///< whose weights are in memory at a time

    T* logits;                ///< [query_heads][keys of a block][queries] before the first mixing
    T* mixed;                 ///< [value_heads][keys of a block][queries] after the second
    T* share;                 ///< [heads][queries] what e^(score - largest score) is multiplied with in the end
    T* last_maximum;          ///< [heads][queries] the largest score of all
    T* block_share;           ///< [heads][queries] the same for the weights of a block
    T* ones;                  ///< [queries]
    T* maximum;               ///< [blocks][heads][queries] the largest score up to a block
    T* weights;               ///< [blocks][heads][keys of a block][queries]
    T* scratch;               ///< [keys of a block][queries] of a score function
    std::uint64_t* seen;      ///< [blocks][keys of a block]
    std::uint64_t* visible;   ///< [heads, or 1 if they see the same][keys of a block]
    std::uint64_t* unwritten; ///< [value_heads] rows whose sums were not finite so far, one bit per query
    std::byte* copies;        ///< of keys or values that cannot be read in place

    score_stage<T>* queries; ///< [query_heads]
    state_type* states;      ///< [heads] of the softmax
    state_type* sums;        ///< [value_heads] of the values: those of the softmax, where its weights are not mixed

    talking_heads_memory(detail::scratch& memory, const talking_heads_shape& s, bool keeps_weights)
        : heads(s.heads), block_keys(std::clamp<index_t>(s.keys, 1, keys_of_block)),
          // The mixings read all heads at once: one row more than there are keys, so that they do not lie a multiple of 4 KiB apart, in
          // the same sets of the first-level cache.
          head_stride((block_keys + 1) * max_queries), blocks(keeps_weights ? (s.keys + keys_of_block - 2) / keys_of_block + 1 : 1),
          logits(memory.take<T>(s.mixes_logits ? s.query_heads : 0, head_stride)),
          mixed(memory.take<T>(s.mixes_weights ? s.value_heads : 0, head_stride)), share(memory.take<T>(heads, max_queries)),
          last_maximum(memory.take<T>(s.mixes_weights ? heads : 0, max_queries)),
          block_share(memory.take<T>(s.mixes_weights ? heads : 0, max_queries)), ones(memory.take<T>(max_queries)),
          maximum(memory.take<T>(blocks, heads, max_queries)), weights(memory.take<T>(blocks, heads, head_stride)),
          scratch(memory.take<T>(s.scored ? block_keys : 0, max_queries)), seen(memory.take<std::uint64_t>(blocks, block_keys)),
          visible(memory.take<std::uint64_t>(s.heads_alike ? 1 : heads, block_keys)), unwritten(memory.take<std::uint64_t>(s.value_heads)),
          copies(memory.take<std::byte>(std::max(copied_bytes(s.key_channels, false), copied_bytes(s.value_channels, true)))),
          queries(memory.take<score_stage<T>>(s.query_heads)), states(memory.take<state_type>(heads)),
          sums(s.mixes_weights ? memory.take<state_type>(s.value_heads) : states) {
        for (index_t a = 0; a < s.query_heads; ++a) {
            const score_stage<T> stage(memory, s.key_channels);
            if (queries) std::construct_at(queries + a, stage);
        }
        const auto padded = whole_registers<T>(s.value_channels);
        for (index_t c = 0; c < heads; ++c) {
            const auto state = state_type::take(memory, max_queries, s.mixes_weights ? 0 : padded);
            if (states) std::construct_at(states + c, state);
        }
        for (index_t e = 0; e < (s.mixes_weights ? s.value_heads : 0); ++e) { // what is mixed has been divided, and is not rescaled
            T* const values = memory.take<T>(max_queries, padded);
            const state_type state{.value_stride = padded, .sum = ones, .factor = ones, .unit = ones, .values = values};
            if (sums) std::construct_at(sums + e, state);
        }
        if (ones) std::fill_n(ones, max_queries, T{1});
    }

    /// The reader of blocks of keys or of values; there is memory for one at a time.
    block_reader<T> reader(index_t channels, bool pads) const {
        detail::scratch memory(copies);
        return {memory, block_keys, channels, pads};
    }
    /// Block number n. Where weights are not kept, all blocks share the same memory.
    weight_block<T> block(index_t n, const key_run& keys, bool all_seen) const {
        const auto slot = blocks > 1 ? n : 0;
        return {keys, weights + slot * heads * head_stride, maximum + slot * heads * max_queries, seen + slot * block_keys, all_seen};
    }

private:
    index_t copied_bytes(index_t channels, bool pads) const {
        return static_cast<index_t>(detail::bytes_for<block_reader<T>>(block_keys, channels, pads));
    }
};

} // namespace attn::kernel
