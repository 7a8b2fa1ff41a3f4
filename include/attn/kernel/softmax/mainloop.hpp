// The mainloop: one query block walks the key blocks that its pattern shows, span by span.
#pragma once

#include "epilogue.hpp"
#include "../prefetch.hpp"
#include "key_reader.hpp"
#include "score_adjustment.hpp"
#include "score_stage.hpp"
#include "value_stage.hpp"
#include "visible_keys.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a call of softmax attention is made of.
template <Scalar T>
struct softmax_call {
    /// Keys of a block: enough to hide the loads and stores of O, few enough for the cache. So many blocks are a span, whose softmax is
    /// finished by itself.
    static constexpr index block_keys = 128, span_blocks = 8;

    const inputs<T>& in;
    const outputs<T>& out;
    const visible_keys& pattern;
    const score_adjustment<T>* adjustment; ///< none if scores stay as they are
    T scale;
    std::span<const double> sinks;

    key_blocks blocks_of(const query_block& queries) const {
        return {block_keys, in.positions.first_key[queries.batch], in.keys.shape().tokens, queries.tokens};
    }
};

/// One thread's memory, and its work on one query block after the other.
template <Scalar T, class Arch, class Prefetch = prefetch_next>
class mainloop {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = query_block_traits<T, Arch>;
    using state_type = softmax_state<T, Arch>;
    static constexpr index block_keys = softmax_call<T>::block_keys, span_blocks = softmax_call<T>::span_blocks;

    mainloop(detail::scratch& memory, const softmax_call<T>& call)
        : mainloop(memory, &call, call.in.keys.shape(), call.in.values.shape()) {}
    /// What it takes of the memory.
    static std::size_t bytes(const shape& keys, const shape& values) {
        detail::scratch memory;
        mainloop(memory, nullptr, keys, values);
        return memory.used_bytes();
    }

    /// next: the query block that this thread is likely to begin with afterwards, or null.
    void begin(const query_block& block, const query_block* next, index pass) {
        block_ = &block;
        next_ = next;
        pass_ = pass;
        queries_.begin(block, call_->in.queries, call_->scale);
        const auto first_key = call_->in.positions.first_key[block.batch];
        keys_.begin(rows_of(call_->in.keys, block.batch, block.kv_head), first_key);
        values_.begin(rows_of(call_->in.values, block.batch, block.kv_head), first_key);
    }
    /// Calls end_of_span(state, rows, unit) for each span of key blocks first .. end - 1 that the pattern does not rule out, in order. Rows
    /// come once each, as bits. Those whose sums hold NaN or infinity, be it by a weight of 0 or by a sum that is too large, are done again
    /// first with hidden keys left out, and then with smaller weights.
    template <class F>
    void run(index first, index end, F&& end_of_span) {
        constexpr T small = std::same_as<T, float> ? 0x1p-40 : 0x1p-80;
        const auto blocks = call_->blocks_of(*block_);
        for (auto at = first; at < end;) {
            const auto span_end = std::min(end, (floor_div(at, span_blocks) + 1) * span_blocks);
            visible_block seen[span_blocks];
            index count = 0;
            for_each_visible_block(call_->pattern, *block_, pass_, blocks, at, span_end, [&](visible_block block) { seen[count++] = block; });
            auto rows = count == 0 ? 0 : bit_range(0, block_->rows());
            for (const auto how : {pass_through{false, 1}, pass_through{true, 1}, pass_through{true, small}}) {
                if (rows == 0) break;
                state_.begin(queries_.stride());
                for (index i = 0; i < count; ++i) {
                    const auto block = seen[i].number;
                    ask_for_next(blocks, i + 1 < count ? seen[i + 1].number : span_end, end);
                    push(blocks.run(block, block + 1), seen[i].all, how);
                }
                if (!state_.has_values) break;
                const auto odd = how.unit == small ? 0 : epilogue<T, Arch>::odd_rows(state_, rows);
                end_of_span(std::as_const(state_), rows & ~odd, how.unit);
                rows = odd;
            }
            at = span_end;
        }
    }

private:
    mainloop(detail::scratch& memory, const softmax_call<T>* call, const shape& keys, const shape& values)
        : call_(call), queries_(memory, keys.channels), keys_(memory, block_keys, keys.channels, false),
          values_(memory, block_keys, values.channels, true),
          state_(state_type::take(memory, traits::max_rows, whole_registers<T, Arch>(values.channels))),
          scores_(memory.take<T>(block_keys * traits::max_rows)), scratch_(memory.take<T>(block_keys * traits::max_rows)),
          visible_(memory.take<std::uint64_t>(block_keys)) {}

    /// masked: values of hidden keys are not touched. Weights are multiplied by `unit` before values are.
    struct pass_through {
        bool masked;
        T unit;
    };

    /// What is read next and may still be in memory: where rows are few, and memory is what they wait for, the next key block; after the
    /// last one, the queries and results of the next query block, with its first keys if they are another head's.
    void ask_for_next(const key_blocks& blocks, index number, index end) {
        ahead_.clear();
        const auto& in = call_->in;
        const auto add = [&](const auto& of_keys, const auto& of_values, const query_tile& tokens) {
            const auto each = [&](auto rows, index channels) {
                rows.row_stride *= tokens.step;
                ahead_.add(rows, tokens.count, channels);
            };
            each(of_keys, in.keys.shape().channels);
            each(of_values, in.values.shape().channels);
        };
        const auto add_keys = [&](const query_block& of, const key_run& keys) {
            const auto first = keys.first - in.positions.first_key[of.batch];
            add(rows_of(in.keys, of.batch, of.kv_head, first), rows_of(in.values, of.batch, of.kv_head, first), {first, keys.count, keys.step});
        };
        if (number < end) {
            if (block_->rows() <= lanes::size) add_keys(*block_, blocks.run(number, number + 1));
        } else if (next_) {
            const auto& [batch, head, heads, kv_head, tokens, first_row] = *next_;
            if (batch != block_->batch || kv_head != block_->kv_head) {
                const auto of_next = call_->blocks_of(*next_);
                add_keys(*next_, of_next.run(of_next.first_block(), of_next.first_block() + 1));
            }
            add(rows_of(in.queries, batch, head, first_row), rows_of(call_->out.values, batch, head, first_row), tokens);
        }
    }

    /// Scores of a key block become weights, and add its values.
    void push(key_run keys, bool all, const pass_through& how) {
        const auto stride = queries_.stride();
        if (!all) {
            call_->pattern.find(*block_, pass_, keys, visible_);
            index first = 0;
            while (first < keys.count && visible_[first] == 0) ++first;
            while (first < keys.count && visible_[keys.count - 1] == 0) --keys.count;
            if (first == keys.count) return;
            std::copy(visible_ + first, visible_ + keys.count, visible_);
            keys.first += first * keys.step;
            keys.count -= first;
        }
        const auto* const visible = all ? nullptr : visible_;
        queries_.multiply(keys_.read(keys), keys.count, visible, scores_, ahead_);
        if (call_->adjustment) (*call_->adjustment)({*block_, keys, scores_, stride, scratch_});
        if (!all) hide_scores<T, Arch>(scores_, keys.count, stride, visible_);
        if (how.masked) find_seen(keys.count, all);
        state_.push(scores_, keys.count, stride);
        if (how.masked)
            add_seen_values(state_, block_->rows(), scores_, stride, values_.read(keys), keys.count, visible_, how.unit);
        else
            add_weighted_values(state_, block_->rows(), scores_, stride, values_.read(keys), keys.count, visible, ahead_);
    }
    /// Which keys count: those that the pattern shows, and whose score is not -infinity.
    void find_seen(index keys, bool all) {
        for (index j = 0; j < keys; ++j) {
            if (all) visible_[j] = bit_range(0, block_->rows());
            for (index row = 0; row < block_->rows(); ++row)
                if (scores_[j * queries_.stride() + row] == state_type::hidden) visible_[j] &= ~bit_range(row, 1);
        }
    }

    const softmax_call<T>* call_;
    const query_block *block_ = nullptr, *next_ = nullptr;
    index pass_ = 0;
    score_stage<T, Arch> queries_;
    block_reader<T, Arch> keys_, values_;
    state_type state_;
    T *scores_, *scratch_;
    std::uint64_t* visible_;
    Prefetch ahead_;
};

} // namespace attn::kernel
