// The mainloop: one query block walks the key blocks that its pattern shows, span by span.
#pragma once

#include "../prefetch.hpp"
#include "../attend/epilogue.hpp"
#include "../attend/key_reader.hpp"
#include "../attend/score_adjustment.hpp"
#include "../attend/score_stage.hpp"
#include "../attend/value_stage.hpp"
#include "../attend/visit.hpp"

#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a call of softmax attention is made of.
template <Scalar T>
struct softmax_call {
    /// Keys of a block: enough to hide the loads and stores of O, few enough for the cache.
    static constexpr index_t block_keys = 128;

    const inputs<T>& in;
    const outputs<T>& out;
    const visible_keys& pattern;
    const score_adjustment<T>* adjustment; ///< none if scores stay as they are
    T scale;
    std::span<const double> sinks;
    const sequence_pages<T>* pages = nullptr; ///< where keys and values lie, of which `in` then tells the shapes only

    /// The same with other keys and values.
    softmax_call of_keys(const inputs<T>& other) const { return {other, out, pattern, adjustment, scale, sinks, pages}; }
    key_blocks blocks_of(const query_block& queries) const {
        return {block_keys, in.positions.first_key[queries.batch], in.keys.shape().tokens, queries.tokens};
    }
};

/// One thread's memory, and its work on one query block after the other.
/// E: what queries and keys, weights and values are multiplied as. Stored: how the tensors may be stored. State: what scores become weights
/// and sums in.
template <Scalar T, class E, class Stored, class State>
class mainloop {
public:
    using lanes = simd::lanes<T>;
    using traits = query_block_traits<T, E>;
    using state_type = State;
    static constexpr index_t block_keys = softmax_call<T>::block_keys;

    /// call: may be left out to tell how much memory there is to be.
    mainloop(detail::scratch& memory, const input_shapes& s, const softmax_call<T>* call = nullptr)
        : call_(call), queries_(memory, s.keys.channels), keys_(memory, block_keys, s.keys.channels, false),
          values_(memory, block_keys, s.values.channels, true),
          state_{softmax_state<T>::take(memory, traits::max_rows, whole_registers<T>(s.values.channels))},
          scores_(memory.take<T>(block_keys * traits::max_rows)), scratch_(memory.take<T>(block_keys * traits::max_rows)),
          seen_(memory.take<std::uint64_t>(block_keys)) {
        for (auto& span : spans_) span = visible_span(memory, block_keys, gathers);
    }

    /// next: the query block after it, or null.
    void begin(const query_block& block, const query_block* next, index_t pass) {
        block_ = &block;
        next_ = next;
        pass_ = pass;
        span_ = &spans_[block.masks];
        if (!block.shares_masks) span_->forget();
        has_read_ = false;
    }
    /// Whether the block sees something of key blocks first .. end - 1, with which a run may go on.
    bool sees(index_t first, index_t end) {
        return first < end && span_->find(call_->pattern, *block_, pass_, call_->blocks_of(*block_), first, end);
    }
    /// Calls end_of_span(state, rows) for each span of key blocks first .. end - 1 that the pattern does not rule out, in order. Rows
    /// come once each, as bits; some are done again first (recompute_masked).
    void run(index_t first, index_t end, const auto& end_of_span) {
        const auto blocks = call_->blocks_of(*block_);
        for (; sees(first, end); first = span_->end()) {
            if (!std::exchange(has_read_, true)) read();
            const auto parts = span_->parts();
            recompute_masked<T>(bit_range(0, block_->rows()), [&](std::uint64_t rows, const pass_through<T>& how) {
                state_.begin(whole_registers<T>(block_->rows()), how.unit);
                for (const auto& part : parts) {
                    const bool last = &part == &parts.back();
                    ask_for_next(last ? blocks.run(span_->end(), std::min(span_->end() + 1, end)) : in_order((&part)[1]));
                    push(part, how.masked);
                }
                const auto non_finite = how.is_last() ? 0 : epilogue<T, Stored, State>::non_finite_rows(state_, rows);
                end_of_span(std::as_const(state_), rows & ~non_finite);
                return non_finite;
            });
        }
    }

private:
    static constexpr bool is_paged = head_rows<Stored, T>::are_paged;
    static constexpr bool gathers = simd::terms_of<E> == 1; ///< keys of one operand stay together
    static_assert(block_keys <= 256, "their numbers are bytes");
    using key_rows = typename head_rows<Stored, T>::type;

    /// Begins with the block's queries and keys.
    void read() {
        queries_.begin(*block_, Stored::view(call_->in.queries), call_->scale, !call_->adjustment);
        const auto first_key = call_->in.positions.first_key[block_->batch];
        keys_.begin(keys_of(*block_), first_key);
        values_.begin(values_of(*block_), first_key);
    }
    key_rows keys_of(const query_block& block) const {
        if constexpr (is_paged) return call_->pages->keys_of(block.kv_head);
        else return Stored::view(call_->in.keys).rows(block.batch, block.kv_head);
    }
    key_rows values_of(const query_block& block) const {
        if constexpr (is_paged) return call_->pages->values_of(block.kv_head);
        else return Stored::view(call_->in.values).rows(block.batch, block.kv_head);
    }

    /// The keys that are read in order, which can be asked for: none that are gathered.
    static key_run in_order(const visible_run& part) {
        return part.gathered ? key_run{part.keys.first, 0, part.keys.step, false} : part.keys;
    }
    /// What is read next and may still be in memory: where rows are few, and memory is what they wait for, the next keys; after the last,
    /// the queries and results of the next query block, with its keys: what is known that it sees beyond these, or another head's first.
    void ask_for_next(const key_run& coming) {
        ahead_.clear();
        keys_.expect_nothing();
        values_.expect_nothing();
        const auto& in = call_->in;
        const auto add_keys = [&](const query_block& of, const key_run& keys) {
            const auto first = keys.first - in.positions.first_key[of.batch];
            if constexpr (is_paged)
                if (queries_.is_few()) {
                    keys_.expect(keys_of(of), first, keys.count, keys.step);
                    values_.expect(values_of(of), first, keys.count, keys.step);
                    return;
                }
            add_coming(ahead_, keys_of(of), first, keys.count, keys.step, in.keys.shape().channels);
            add_coming(ahead_, values_of(of), first, keys.count, keys.step, in.values.shape().channels);
        };
        if (coming.count > 0) {
            if (block_->rows() <= lanes::size) add_keys(*block_, coming);
        } else if (next_) {
            const auto of_next = call_->blocks_of(*next_);
            const bool same_keys = next_->batch == block_->batch && next_->kv_head == block_->kv_head;
            if (next_->shares_masks) {
                const auto last = span_->parts().back().keys.positions().last;
                for (const auto& part : spans_[next_->masks].parts_from(of_next.first_block()))
                    if (!same_keys || part.keys.first > last) add_keys(*next_, in_order(part));
            } else if (!same_keys) {
                add_keys(*next_, of_next.run(of_next.first_block(), of_next.first_block() + 1));
            }
            const auto add_rows = [&](const auto& tensor, index_t channels) {
                const auto rows = Stored::view(tensor).rows(next_->batch, next_->first_head, next_->first_row);
                ahead_.add(rows.every(next_->tokens.step), next_->tokens.count, channels);
            };
            add_rows(in.queries, in.keys.shape().channels);
            add_rows(call_->out.values, in.values.shape().channels);
        }
    }

    /// Scores of a key block become weights, and add its values.
    void push(const visible_run& part, bool masked) {
        const auto stride = queries_.stride();
        const auto before = keys_before<E>(part.keys);
        const auto* const visible = part.rows;
        T* const scores = scores_ + before * stride;
        if (part.gathered) queries_.multiply(keys_.gather(part), part.count, visible, scores, ahead_);
        else queries_.multiply_run(keys_, part.keys, visible, scores, ahead_);
        if (call_->adjustment)
            part.for_each_run([&](index_t first, const key_run& keys) {
                (*call_->adjustment)({*block_, keys, scores + first * stride, stride, scratch_});
            });
        if (visible) hide_scores<T>(scores, part.count, stride, visible);
        for (index_t j = 0; masked && j < part.count; ++j)
            seen_[j] = rows_not_hidden<T>(scores + j * stride, stride) & bit_range(0, block_->rows());
        std::fill(scores_, scores, state_type::hidden);
        const E* const weights = state_.template push<E>(scores_, before + part.count, stride, visible);
        const auto add = [&](const auto& values) {
            add_weighted_values(state_, block_->rows(), weights, stride, values, part.count, visible, ahead_, before);
        };
        const auto read = [&] { return part.gathered ? values_.gather(part) : values_.read(part.keys, before); };
        if (masked) add_seen_values(state_, block_->rows(), weights, stride, read(), part.count, seen_, before);
        else if (part.gathered) add(values_.gather(part));
        else with_values(part.keys, before, add);
    }
    /// f(the values of a run): as they are stored where rows are few.
    void with_values(const key_run& keys, index_t before, const auto& f) {
        if constexpr (is_paged)
            if (queries_.is_few() && values_.stream(keys, f)) return;
        if (const auto stored = values_.stored(keys); queries_.is_few() && values_.can_widen(stored))
            as_they_lie(stored, [&]<class V>(const row_block<const V>& values) {
                if constexpr (Narrow<V> && std::same_as<E, T>) f(values);
            });
        else f(values_.read(keys, before));
    }

    const softmax_call<T>* call_;
    const query_block *block_ = nullptr, *next_ = nullptr;
    index_t pass_ = 0;
    bool has_read_ = false; ///< the block's queries
    score_stage<T, E, head_rows<Stored, T>::few_rows> queries_;
    block_reader<T, typename operand_rows<T, E>::of_channels, key_rows> keys_;
    block_reader<T, typename operand_rows<T, E>::of_rows, key_rows> values_;
    state_type state_;
    T *scores_, *scratch_;
    std::uint64_t* seen_; ///< [block_keys] where hidden keys are left out
    visible_span spans_[std::size_t{kept_masks}], *span_ = nullptr;
    prefetch_next ahead_;
};

} // namespace attn::kernel
