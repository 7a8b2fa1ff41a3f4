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
        : call_(call), f_(f), heads_(s.queries.heads), group_(s.queries.heads / std::max<index_t>(1, s.keys.heads)), keys_(s.keys.tokens),
          sum_stride_(whole_registers<T>(keys_) + lanes::size), reader_(memory, block_keys, s.keys.channels, false),
          stages_(memory.take<score_stage<T>>(heads_)), terms_(memory.take<term>(heads_, traits::max_rows)),
          scores_(memory.take<T>(block_keys, traits::max_rows)),
          sums_(memory.take<T>(std::min(traits::max_rows, s.queries.tokens), sum_stride_)), seen_(memory.take<std::uint64_t>(keys_)),
          candidates_(memory.take<candidate>(keys_)) {
        for (index_t h = 0; h < heads_; ++h) {
            const score_stage<T> stage(memory, s.keys.channels);
            if (stages_) std::construct_at(stages_ + h, stage);
        }
    }

    /// Writes the rows of the table for the queries of a block of one head, which stands for all of them.
    void choose(const query_block& block) {
        const auto first_key = call_->in.positions.first_key[block.batch];
        for_each_part(block, [&](const query_block& part) { begin(part); });
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

    /// What the score of a row is multiplied by, and whose sum it is part of.
    struct term {
        T weight;
        T* sums;
        bool is_first;
    };

    /// f(block) of some heads at a time that share their keys: as many as make no more rows than a block has.
    void for_each_part(query_block block, const auto& f) const {
        const auto together = std::max<index_t>(1, traits::max_rows / std::max<index_t>(1, block.tokens.count));
        for (block.first_head = 0; block.first_head < heads_; block.first_head += block.heads) {
            block.kv_head = block.first_head / group_;
            block.heads = std::min(together, (block.kv_head + 1) * group_ - block.first_head);
            f(block);
        }
    }
    void begin(const query_block& part) {
        stages_[part.first_head].begin(part, call_->in.queries, T{1});
        for (index_t row = 0; row < part.rows(); ++row) {
            const auto token = row % part.tokens.count;
            term& own = terms_[part.first_head * traits::max_rows + row];
            own = {T{0}, sums_ + token * sum_stride_, part.head_of(row) == 0};
            copy_rows<T>(call_->weights.rows(part.batch, part.head_of(row), part.token_of(row)), 1, 1, &own.weight, 1);
        }
    }
    key_rows keys_of(const query_block& part) const {
        if constexpr (head_rows<Stored, T>::are_paged) return call_->pages->keys_of(part.kv_head);
        else return call_->in.keys.rows(part.batch, part.kv_head);
    }
    /// Adds the heads' scores of a run of keys, the first of which has that number. Scores have rows side by side, and sums keys.
    void add(const query_block& block, const key_run& keys, index_t number) {
        const auto run = visible_run_of(call_->pattern, block, visible_keys::whole, keys, seen_ + number);
        if (keys.full) std::fill_n(seen_ + number, keys.count, bit_range(0, block.rows()));
        number += run.keys.first - keys.first;
        for_each_part(block, [&](const query_block& part) {
            const auto& stage = stages_[part.first_head];
            const term* const terms = terms_ + part.first_head * traits::max_rows;
            reader_.begin(keys_of(part), call_->in.positions.first_key[part.batch]);
            stage.multiply_run(reader_, run.keys, part.heads == 1 ? run.rows : nullptr, scores_, no_prefetch());
            for_each_transposed(row_block<const T>{scores_, stage.stride(), 1}, run.count, part.rows(), T{1},
                                [&](index_t row, index_t first, lanes score) {
                                    T* const sum = terms[row].sums + number + first;
                                    const auto before = terms[row].is_first ? lanes(T{0}) : lanes::load(sum);
                                    fma(lanes(terms[row].weight), static_cast<lanes>((*f_)(score)), before).store(sum);
                                });
        });
    }
    void write_row(const query_block& block, index_t row) {
        index_t count = 0;
        for (index_t j = 0; j < keys_; ++j) {
            if (!(seen_[j] >> row & 1)) continue;
            const T score = sums_[row * sum_stride_ + j];
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
    index_t heads_, group_, keys_;
    index_t sum_stride_; ///< numbers between the sums of two queries: keys, and a register more, which the last of a run may be written to
    block_reader<T, number_rows<T>, key_rows> reader_;
    score_stage<T>* stages_; ///< of each part, by its first head
    term* terms_;            ///< [heads][rows], likewise
    T* scores_;              ///< [block_keys][rows of a part]
    T* sums_;                ///< [queries][sum_stride_]
    std::uint64_t* seen_;    ///< [m] one bit per row
    candidate* candidates_;  ///< [m]
};

} // namespace attn::kernel
