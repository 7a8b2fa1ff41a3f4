// The scores by which keys are chosen for a query: sums over heads, for one block of queries and all keys.
#pragma once

#include "key_reader.hpp"
#include "score_stage.hpp"
#include "visit.hpp"

#include <algorithm>
#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A call of select_tokens: queries (batch, heads, n, d), keys (batch, kv_heads, m, d), weights (batch, heads, n, 1).
template <Scalar T>
struct token_selection_call {
    const inputs<T>& in; ///< the values are the keys
    stored_view<const T> weights;
    const visible_keys& pattern;
    index_t count;
    tensor_view<index_t> table;               ///< (batch, 1, n, count)
    const sequence_pages<T>* pages = nullptr; ///< where keys lie, of which `in` then tells the shapes only
};

/// One thread's memory, and its work on one block of queries after the other.
///     score[i, j] = sum over heads h, in order, of weight[i, h] f(q_i,h . k_j)
/// Stored: how keys lie, any_storage or, behind pages.hpp, paged_storage.
template <Scalar T, class F, class Stored = any_storage>
class token_scores {
    using key_rows = typename head_rows<Stored, T>::type;

public:
    using lanes = simd::lanes<T>;
    using traits = query_block_traits<T>;
    static constexpr index_t block_keys = 128;

    token_scores(detail::scratch& memory, const input_shapes& s, const token_selection_call<T>* call = nullptr, const F* f = nullptr)
        : call_(call), f_(f), heads_(s.queries.heads), keys_(s.keys.tokens),
          stride_(std::min(traits::max_rows, whole_registers<T>(s.queries.tokens))), reader_(memory, block_keys, s.keys.channels, false),
          stages_(memory.take<score_stage<T>>(heads_)), weights_(memory.take<T>(heads_, stride_)),
          scores_(memory.take<T>(block_keys, stride_)), sums_(memory.take<T>(keys_, stride_)), seen_(memory.take<std::uint64_t>(keys_)),
          candidates_(memory.take<candidate>(keys_)) {
        for (index_t h = 0; h < heads_; ++h) {
            const score_stage<T> stage(memory, s.keys.channels);
            if (stages_) std::construct_at(stages_ + h, stage);
        }
    }

    /// Writes the rows of the table for the queries of a block of one head, which stands for all of them.
    void choose(const query_block& block) {
        const auto first_key = call_->in.positions.first_key[block.batch];
        for (index_t h = 0; h < heads_; ++h) begin_head(block, h);
        std::fill_n(seen_, keys_, std::uint64_t{0});
        const key_blocks blocks(block_keys, first_key, keys_, block.tokens);
        for_each_visible_block(call_->pattern, block, visible_keys::whole, blocks, blocks.first_block(), blocks.end_block(),
                               [&](const key_run& keys) { add(block, keys, keys.first - first_key); });
        for (index_t row = 0; row < block.rows(); ++row) write_row(block, row);
    }

private:
    struct candidate {
        T score;
        index_t key;
        /// Whether it is chosen before another: the higher score, of equal ones the earlier key.
        bool operator<(const candidate& other) const { return score != other.score ? score > other.score : key < other.key; }
    };

    key_rows keys_of(index_t batch, index_t head) const {
        const auto kv_head = head / (heads_ / call_->in.keys.shape().heads);
        if constexpr (head_rows<Stored, T>::are_paged) return call_->pages->keys_of(kv_head);
        else return call_->in.keys.rows(batch, kv_head);
    }
    void begin_head(query_block block, index_t head) {
        block.first_head = head;
        stages_[head].begin(block, call_->in.queries, T{1});
        T* const weights = weights_ + head * stride_;
        std::fill_n(weights, stride_, T{0});
        copy_rows<T>(call_->weights.rows(block.batch, head, block.first_row), block.rows(), 1, weights, 1);
    }
    /// Adds the heads' scores of a run of keys, the first of which has that number.
    void add(const query_block& block, const key_run& keys, index_t number) {
        const auto run = visible_run_of(call_->pattern, block, visible_keys::whole, keys, seen_ + number);
        if (!run.rows) std::fill_n(seen_ + number, keys.count, bit_range(0, block.rows()));
        number += run.keys.first - keys.first;
        for (index_t h = 0; h < heads_; ++h) {
            const auto& stage = stages_[h];
            const auto rows = stage.stride();
            T* const sums = sums_ + number * stride_;
            reader_.begin(keys_of(block.batch, h), call_->in.positions.first_key[block.batch]);
            stage.multiply(reader_.read(run.keys), run.count, run.rows, scores_, ahead_);
            for (index_t j = 0; j < run.count; ++j)
                for (index_t row = 0; row < rows; row += lanes::size) {
                    T* const sum = sums + j * stride_ + row;
                    const auto before = h == 0 ? lanes(T{0}) : lanes::load(sum);
                    const auto score = static_cast<lanes>((*f_)(lanes::load(scores_ + j * rows + row)));
                    fma(lanes::load(weights_ + h * stride_ + row), score, before).store(sum);
                }
        }
    }
    void write_row(const query_block& block, index_t row) {
        index_t count = 0;
        for (index_t j = 0; j < keys_; ++j) {
            if (!(seen_[j] >> row & 1)) continue;
            const T score = sums_[j * stride_ + row];
            candidates_[count++] = {std::isnan(score) ? -std::numeric_limits<T>::infinity() : score, j};
        }
        const auto chosen = std::min(count, call_->count);
        std::nth_element(candidates_, candidates_ + chosen, candidates_ + count);
        std::sort(candidates_, candidates_ + chosen, [](const candidate& a, const candidate& b) { return a.key < b.key; });
        index_t* const to = call_->table.row(block.batch, 0, block.first_row + row);
        for (index_t e = 0; e < call_->count; ++e)
            to[e] = e < chosen ? call_->in.positions.first_key[block.batch] + candidates_[e].key : index_t{-1};
    }

    const token_selection_call<T>* call_;
    const F* f_;
    index_t heads_, keys_;
    index_t stride_; ///< numbers between the sums of two keys: the rows of a block, in whole registers
    block_reader<T, number_rows<T>, key_rows> reader_;
    score_stage<T>* stages_; ///< of each head
    T *weights_, *scores_;   ///< [heads][stride_], [block_keys][rows of the block]
    T* sums_;                ///< [m][stride_]
    std::uint64_t* seen_;    ///< [m] one bit per row
    candidate* candidates_;  ///< [m]
    no_prefetch ahead_;
};

} // namespace attn::kernel
