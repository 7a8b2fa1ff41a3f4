// The tiles of a gradient of talking-heads attention: a query block with a key block, computed again.
#pragma once

#include "../softmax/visit.hpp"
#include "../softmax_gradient/seen_products.hpp"
#include "call.hpp"
#include "memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What sums over pairs are made of. Pairs that a head does not see, and the padding of a block, have scores of -infinity; what no head
/// sees is 0 before it gets to a mixing's sums.
template <Scalar T>
class talking_gradient_tiles {
public:
    using lanes = simd::lanes<T>;
    using memory_type = talking_gradient_memory<T>;
    static constexpr auto max_queries = memory_type::max_queries;

protected:
    talking_gradient_tiles(detail::scratch& memory, const talking_gradient_call<T>& call)
        : call_(call), s_(call.shape), memory_(memory, call.shape) {}

    /// Calls f() for the query blocks of a task.
    void for_each_query_block(const talking_gradient_task& task, const auto& f) {
        task_ = task;
        const auto first_query = call_.in.positions.first_query[task.batch], n = call_.in.queries.shape().tokens;
        for (auto t = task.first_block; t < task.end_block; ++t) {
            const auto tokens = tile_at(t, first_query, n, max_queries, task.step, lanes::size);
            block_ = {.batch = task.batch, .heads = s_.heads, .tokens = tokens, .first_row = tokens.first - first_query};
            finite_queries_ = copy(memory_.query_rows, memory_.key_stride, call_.in.queries.numbers());
            finite_d_out_ = copy(memory_.d_out_rows, memory_.value_stride, call_.d_out.values);
            for (index_t a = 0; a < s_.query_heads; ++a) memory_.queries[a].begin(of_head(a), call_.in.queries, call_.scale);
            for (index_t e = 0; e < s_.value_heads; ++e) memory_.d_out[e].begin(of_head(e), call_.d_out.values, 1);
            for (index_t c = 0; c < s_.heads; ++c) {
                auto& rows = memory_.rows[c] = {};
                for (index_t r = 0; r < tokens.count; ++r) {
                    rows.log_sum_exp[r] = call_.saved.log_sum_exp(task.batch, c, block_.token_of(r), 0);
                    rows.share[r] = 1;
                }
            }
            f();
        }
    }
    /// Calls f(keys) with the tiles of those that any head sees, computed.
    void for_each_key_block(const auto& f) {
        const key_blocks blocks(memory_type::keys_of_block, call_.in.positions.first_key[block_.batch] + task_.first_key,
                                task_.end_key - task_.first_key, block_.tokens);
        const auto first = blocks.first_block(), end = blocks.end_block();
        if (first == end) return;
        for_each_visible_block(call_.pattern, block_, visible_keys::whole, blocks, first, end, [&](key_run keys) {
            all_visible_ = keys.full && block_.tokens.count == stride();
            keys.count = find_visible_heads(call_.pattern, block_, keys, s_.heads_alike, memory_.block_keys, memory_.visible, memory_.seen);
            if (keys.count == 0) return;
            compute(keys);
            f(keys);
        });
    }
    /// Calls f(head, rows) for the heads that share the heads of keys or values.
    void for_each_head(const stored_view<const T>& tensor, block_reader<T> reader, index_t heads, const key_run& keys,
                       const auto& f) const {
        const auto shared = tensor.shape().heads;
        for (index_t head = 0; head < shared; ++head) {
            reader.begin(tensor.rows(block_.batch, head), call_.in.positions.first_key[block_.batch]);
            const auto rows = reader.read(keys);
            for (index_t own = head * heads / shared; own < (head + 1) * heads / shared; ++own) f(own, head, rows);
        }
    }

    index_t stride() const { return whole_registers<T>(block_.tokens.count); }
    query_block of_head(index_t head) const {
        return {.batch = block_.batch, .first_head = head, .heads = 1, .tokens = block_.tokens, .first_row = block_.first_row};
    }
    T* tile(T* all, index_t head) const { return all + head * memory_.head_stride; }
    T* delta_of(index_t head) const { return call_.delta + first_row(head); }
    T* share_of(index_t head) const { return call_.share + first_row(head); }
    head_block as_heads(const key_run& keys) const { return {keys.count, stride() / lanes::size, memory_.head_stride, seen()}; }
    const std::uint64_t* seen() const { return all_seen_ ? nullptr : memory_.seen; }

    const talking_gradient_call<T>& call_;
    const talking_heads_shape& s_;
    memory_type memory_;
    talking_gradient_task task_{};
    query_block block_;
    bool finite_queries_ = true, finite_d_out_ = true; ///< of the query block

private:
    index_t first_row(index_t head) const { return (block_.batch * s_.heads + head) * call_.in.queries.shape().tokens; }
    /// The rows of the block in all heads, in whole registers. Whether all are finite.
    bool copy(T* to, index_t to_stride, const tensor_view<const T>& from) const {
        bool finite = true;
        for (index_t h = 0; h < from.shape().heads; ++h, to += max_queries * to_stride) {
            const auto rows = from.rows(block_.batch, h, block_.first_row).every(block_.tokens.step);
            copy_rows<T>(rows, block_.tokens.count, from.shape().channels, to, to_stride);
            finite = finite && are_finite<T>({to, to_stride, 1}, block_.tokens.count, to_stride);
        }
        return finite;
    }
    /// Scores of the mixed heads, and the gradients by their weights.
    void compute(const key_run& keys) {
        no_prefetch ahead;
        const auto count = keys.count;
        for_each_head(call_.in.keys, memory_.keys, s_.query_heads, keys, [&](index_t a, index_t, const auto& rows) {
            memory_.queries[a].multiply(rows, count, all_visible_ ? nullptr : memory_.seen, tile(memory_.logits, a), ahead);
        });
        all_seen_ = all_visible_;
        if (s_.mixes_logits) call_.logits_mix(as_heads(keys), memory_.logits, memory_.scores);
        for (index_t c = 0; c < s_.heads; ++c) {
            T* const scores = tile(memory_.scores, c);
            if (call_.slopes) (*call_.slopes)({of_head(c), keys, scores, stride(), memory_.scratch}, tile(memory_.slopes, c), {});
            if (!all_visible_) hide_scores<T>(scores, count, stride(), memory_.visible_to(s_.heads_alike ? 0 : c));
        }
        find_seen(count);
        if (s_.mixes_logits) forget_unseen(memory_.logits, s_.query_heads, count);
        for_each_head(call_.in.values, memory_.values, s_.value_heads, keys, [&](index_t e, index_t, const auto& rows) {
            memory_.d_out[e].multiply(rows, count, seen(), tile(memory_.of_mixed, e), ahead);
        });
        forget_unseen(memory_.of_mixed, s_.value_heads, count);
        if (s_.mixes_weights) call_.weights_mix_back(as_heads(keys), memory_.of_mixed, memory_.of_scores);
    }
    /// Which keys count for which query: those whose score is not -infinity in every head.
    void find_seen(index_t count) {
        all_seen_ = true;
        for (index_t j = 0; j < count; ++j) {
            std::uint64_t of_any = 0;
            for (index_t c = 0; c < s_.heads; ++c) of_any |= rows_not_hidden<T>(tile(memory_.scores, c) + j * stride(), stride());
            memory_.seen[j] = of_any;
            all_seen_ = all_seen_ && of_any == bit_range(0, stride());
        }
    }
    /// Makes 0 of what no head sees, whatever it was.
    void forget_unseen(T* tiles, index_t heads, index_t count) const {
        const auto own = simd::lane_bits::first(lanes::size).value;
        for (index_t j = 0; !all_seen_ && j < count; ++j)
            for (index_t row = 0; row < stride(); row += lanes::size) {
                const simd::lane_bits bits{memory_.seen[j] >> row & own};
                if (bits.value == own) continue;
                T* at = tiles + j * stride() + row;
                for (index_t h = 0; h < heads; ++h, at += memory_.head_stride) select(bits, lanes::load(at), lanes(T{0})).store(at);
            }
    }

    bool all_visible_ = false, all_seen_ = false; ///< of the tile
};

} // namespace attn::kernel
