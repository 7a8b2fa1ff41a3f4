// One thread's work on talking-heads attention: a query block walks the key blocks that any head sees, all heads together.
#pragma once

#include "../prefetch.hpp"
#include "../attend/epilogue.hpp"
#include "../attend/score_adjustment.hpp"
#include "../attend/value_stage.hpp"
#include "memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a call of talking-heads attention is made of.
template <Scalar T>
struct talking_heads_call {
    const inputs<T>& in;
    const outputs<T>& out;
    talking_heads_shape shape;
    const visible_keys& pattern;
    const score_adjustment<T>* adjustment; ///< none if scores stay as they are
    const talking_heads_parameters& with;
    const head_mixings<T>& mix;
    bool keeps_weights;
};

/// One thread's memory, and its work on one query block. Beside the tiles of one head the keys or values of the next are asked for: all
/// heads together seldom stay in the second-level cache.
template <Scalar T>
class talking_heads_mainloop {
public:
    using lanes = simd::lanes<T>;
    using memory_type = talking_heads_memory<T>;

    talking_heads_mainloop(detail::scratch& memory, const talking_heads_call<T>& call)
        : call_(call), memory_(memory, call.shape, call.keeps_weights) {}

    /// tokens: so many as memory_type::max_queries at most.
    void run(index_t batch, const query_tile& tokens) {
        const auto& s = call_.shape;
        block_ = {.batch = batch, .heads = s.heads, .tokens = tokens, .first_row = tokens.first - call_.in.positions.first_query[batch]};
        const auto scale = static_cast<T>(call_.with.scale);
        for (index_t a = 0; a < s.query_heads; ++a) memory_.queries[a].begin(block_.of_head(a), call_.in.queries, scale);
        const auto all = bit_range(0, tokens.count);
        std::fill_n(memory_.unwritten, s.value_heads, all);
        recompute_masked<T>(all, [&](std::uint64_t, const pass_through<T>& how) {
            begin(how);
            for_each_block(how, [&](weight_block<T>& block) {
                compute_weights(block, how);
                if (!s.mixes_weights) add_values(block, block.weights, how);
            });
            finish_softmax();
            if (s.mixes_weights) {
                if (!call_.keeps_weights) begin(how);
                for_each_block(how, [&](weight_block<T>& block) {
                    if (call_.keeps_weights) leave_out_last(block);
                    else compute_weights(block, how);
                    mix_weights(block);
                    add_values(block, memory_.mixed, how);
                });
            }
            return write(how);
        });
    }

private:
    index_t stride() const { return whole_registers<T>(block_.tokens.count); }
    /// Weights of one head, and scores until they become weights.
    T* weights(const weight_block<T>& block, index_t head) const { return block.weights + head * memory_.head_stride; }
    head_block as_heads(const weight_block<T>& block) const {
        return {block.keys.count, stride() / lanes::size, memory_.head_stride, block.visible()};
    }
    /// Whether a score of -infinity must be told from a low one: where values of hidden keys are left out, or get no bias.
    bool looks_at_scores(const pass_through<T>& how) const { return how.masked || !call_.with.weights_bias.empty(); }

    void begin(const pass_through<T>& how) {
        for (index_t c = 0; c < call_.shape.heads; ++c) memory_.states[c].begin(stride(), how.unit);
        for (index_t e = 0; e < call_.shape.value_heads; ++e) memory_.sums[e].has_values = false;
    }
    /// Calls f(block) for the key blocks that any head sees.
    void for_each_block(const pass_through<T>& how, const auto& f) {
        const key_blocks blocks(memory_type::keys_of_block, call_.in.positions.first_key[block_.batch], call_.shape.keys, block_.tokens);
        index_t number = 0;
        const auto visit = [&](const key_run& keys) {
            auto block = memory_.block(number++, keys, keys.full && !looks_at_scores(how));
            f(block);
        };
        for_each_visible_block(call_.pattern, block_, visible_keys::whole, blocks, blocks.first_block(), blocks.end_block(), visit);
    }
    /// Calls f(head, rows) for the heads that share the heads of keys or values, with a block of these. pads: in whole registers.
    void for_each_head(const stored_view<const T>& tensor, bool pads, index_t heads, const key_run& keys, const auto& f) {
        const auto& s = tensor.shape();
        auto reader = memory_.reader(s.channels, pads);
        for (index_t head = 0; head < s.heads; ++head) {
            reader.begin(tensor.rows(block_.batch, head), call_.in.positions.first_key[block_.batch]);
            const auto rows = reader.read(keys);
            ask_for_next(tensor, head + 1, keys);
            for (index_t own = head * heads / s.heads; own < (head + 1) * heads / s.heads; ++own) f(own, rows);
        }
    }

    /// The rows of a key block of another head, if there is one.
    void ask_for_next(const stored_view<const T>& tensor, index_t head, const key_run& keys) {
        ahead_.clear();
        if (head == tensor.shape().heads) return;
        const auto rows = tensor.rows(block_.batch, head, keys.first - call_.in.positions.first_key[block_.batch]);
        ahead_.add(rows.every(keys.step), keys.count, tensor.shape().channels);
    }

    /// Scores of all heads, mixed, become weights relative to the largest score so far.
    void compute_weights(weight_block<T>& block, const pass_through<T>& how) {
        const auto& s = call_.shape;
        if (!block.all_seen)
            block.keys.count = std::max<index_t>(1, find_visible_heads(call_.pattern, block_, block.keys, call_.shape.heads_alike,
                                                                       memory_.block_keys, memory_.visible, block.seen));
        T* const logits = s.mixes_logits ? memory_.logits : block.weights;
        for_each_head(call_.in.keys, false, s.query_heads, block.keys, [&](index_t a, const auto& rows) {
            memory_.queries[a].multiply(rows, block.keys.count, block.visible(), logits + a * memory_.head_stride, ahead_);
        });
        if (s.mixes_logits) call_.mix.logits(as_heads(block), logits, block.weights);
        for (index_t c = 0; c < s.heads; ++c) {
            T* const scores = weights(block, c);
            if (call_.adjustment) (*call_.adjustment)({block_.of_head(c), block.keys, scores, stride(), memory_.scratch});
            if (!block.keys.full) hide_scores<T>(scores, block.keys.count, stride(), visible(c));
        }
        if (looks_at_scores(how)) {
            find_seen(block.weights, s.heads, memory_.head_stride, block.keys.count, stride(), block.seen);
            for (index_t j = 0; j < block.keys.count; ++j) block.seen[j] &= bit_range(0, block_.tokens.count);
        }
        for (index_t c = 0; c < s.heads; ++c) {
            memory_.states[c].push(weights(block, c), block.keys.count, stride(), block.keys.full ? nullptr : visible(c));
            if (s.mixes_weights) std::copy_n(memory_.states[c].maximum, stride(), block.maximum + c * memory_type::max_queries);
        }
    }
    /// Leaves out, of a block that is not all seen, the keys behind the last that any query sees.
    static void leave_out_last(weight_block<T>& block) {
        if (block.all_seen) return;
        while (block.keys.count > 1 && block.seen[block.keys.count - 1] == 0) --block.keys.count;
    }
    std::uint64_t* visible(index_t head) const { return memory_.visible + (call_.shape.heads_alike ? 0 : head * memory_.block_keys); }

    /// Completes the softmax when all keys have been seen: a sink per head joins its rows, as a key without a value would.
    void finish_softmax() {
        const auto& log_sum_exp = call_.out.log_sum_exp;
        for (index_t c = 0; c < call_.shape.heads; ++c) {
            const auto& state = memory_.states[c];
            const auto [maximum_at_start, sum_at_start] = state.at_start(call_.with.sinks, c);
            T maximum[memory_type::max_queries], sum[memory_type::max_queries];
            for (index_t q = 0; q < stride(); q += lanes::size) {
                const auto m = lanes::load(state.maximum + q), l = lanes::load(state.sum + q);
                const softmax_merge<T> merged(maximum_at_start, sum_at_start, m, l);
                select(l == lanes(T{0}), lanes(T{0}), merged.b / l).store(memory_.share + c * memory_type::max_queries + q);
                if (call_.shape.mixes_weights) m.store(memory_.last_maximum + c * memory_type::max_queries + q);
                merged.maximum.store(maximum + q);
                merged.sum.store(sum + q);
            }
            if (!log_sum_exp.data()) continue;
            for (index_t q = 0; q < block_.tokens.count; ++q)
                log_sum_exp(block_.batch, c, block_.token_of(q), 0) = softmax_merge<T>::log_sum_exp(maximum[q], sum[q]);
        }
    }
    /// Weights relative to the largest score of all and divided by their sum, across heads.
    void mix_weights(const weight_block<T>& block) {
        for (index_t c = 0; c < call_.shape.heads; ++c)
            for (index_t q = 0; q < stride(); q += lanes::size) {
                const auto at = c * memory_type::max_queries + q;
                const auto below = simd::exp_nonpositive(lanes::load(block.maximum + at) - lanes::load(memory_.last_maximum + at));
                (below * lanes::load(memory_.share + at)).store(memory_.block_share + at);
            }
        call_.mix.weights(as_heads(block), block.weights, memory_.mixed, memory_.block_share, memory_type::max_queries);
    }
    void add_values(const weight_block<T>& block, const T* weights, const pass_through<T>& how) {
        const auto queries = block_.tokens.count, keys = block.keys.count;
        for_each_head(call_.in.values, true, call_.shape.value_heads, block.keys, [&](index_t e, const auto& rows) {
            const T* const own = weights + e * memory_.head_stride;
            if (how.masked) add_seen_values(memory_.sums[e], queries, own, stride(), rows, keys, block.seen);
            else add_weighted_values(memory_.sums[e], queries, own, stride(), rows, keys, block.visible(), ahead_);
        });
    }

    /// Writes head by head what is finite, or has to do. Which queries are left in any head.
    std::uint64_t write(const pass_through<T>& how) {
        const bool mixes = call_.shape.mixes_weights, last = how.is_last() || (mixes && how.masked); // mixed weights have been divided
        std::uint64_t left = 0;
        for (index_t e = 0; e < call_.shape.value_heads; ++e) {
            const auto& sums = memory_.sums[e];
            if (!sums.has_values) std::fill_n(sums.values, block_.tokens.count * sums.value_stride, T{0});
            auto& unwritten = memory_.unwritten[e];
            const auto non_finite = last || unwritten == 0 ? 0 : epilogue<T>::non_finite_rows(sums, unwritten);
            for (auto ready = unwritten & ~non_finite; ready != 0; ready &= ready - 1) {
                const auto q = std::countr_zero(ready);
                const auto to = call_.out.values.rows(block_.batch, e, block_.token_of(q));
                const T factor = mixes ? T{1} : memory_.share[e * memory_type::max_queries + q];
                T* const row = sums.values + q * sums.value_stride;
                const bool narrow = to.is_narrow(); // divided where they are, and then rounded
                write_sums<false, T>(row, how.unit, call_.shape.value_channels, factor, T{0}, narrow ? row : to.numbers().data,
                                     narrow ? 1 : to.channel_stride);
                if (narrow) store_row<T>(row, call_.shape.value_channels, to);
            }
            unwritten = non_finite;
            left |= non_finite;
        }
        return left;
    }

    const talking_heads_call<T>& call_;
    memory_type memory_;
    query_block block_;
    prefetch_next ahead_;
};

} // namespace attn::kernel
