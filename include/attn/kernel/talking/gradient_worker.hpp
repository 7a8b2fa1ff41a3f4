// One thread's work on the gradient of talking-heads attention: query blocks, each with the key blocks that any head sees, all heads
// together.
#pragma once

#include "../attend/visit.hpp"
#include "gradient_memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Each gradient of a token is one chain of multiply-adds: of a query over the keys in order, of a key over query blocks, heads and queries
/// in order. So its bits are the same in any task that computes it. Pairs that a head does not see, and the padding of a block, have scores
/// of -infinity; what no head sees is 0 before it gets to a mixing's sums.
template <Scalar T>
class talking_gradient_worker {
public:
    using lanes = simd::lanes<T>;
    using memory_type = talking_gradient_memory<T>;
    static constexpr auto max_queries = memory_type::max_queries;

    talking_gradient_worker(detail::scratch& memory, const talking_gradient_call<T>& call)
        : call_(call), s_(call.shape), scale_(static_cast<T>(call.with.scale)), memory_(memory, call.shape) {}

    /// dZ - D of the query blocks, and the shares of their weights.
    void find_delta(const talking_gradient_task& task) {
        for_each_query_block(task, [&] {
            std::fill_n(memory_.sums, s_.heads * max_queries, T{0});
            std::fill_n(memory_.totals, s_.heads * max_queries, T{0});
            bool sums = call_.sums_weights;
            for (index_t c = 0; c < s_.heads; ++c) sums = sums || std::ranges::any_of(memory_.rows[c].log_sum_exp, loses_sum<T>);
            if (sums) for_each_key_block([&](const key_run& keys) { add_weighted(keys); });
            if (!call_.sums_weights) {
                std::fill_n(memory_.sums, s_.heads * max_queries, T{0});
                add_products_with_output();
            }
            for (index_t c = 0; c < s_.heads; ++c)
                for (index_t r = 0; r < block_.tokens.count; ++r) {
                    const auto row = block_.token_of(r);
                    const T of_log_sum_exp = call_.d_out.log_sum_exp.data() ? call_.d_out.log_sum_exp(task.batch, c, row, 0) : T{0};
                    const auto at = c * max_queries + r;
                    const T weights = memory_.totals[at] + weight_of_sink(call_.with.sinks, c, memory_.rows[c].log_sum_exp[r]),
                            all = call_.sums_weights ? weights : T{1};
                    delta_of(c)[row] = of_log_sum_exp - (all == 0 ? T{0} : memory_.sums[at] / all);
                    share_of(c)[row] = kernel::share_of(memory_.rows[c].log_sum_exp[r], weights);
                }
        });
    }
    /// The gradients of the task's queries, if of_queries; those of its keys and values, if of_keys; and, if sums are given, what these
    /// queries add to those of the mixings.
    void operator()(const talking_gradient_task& task, bool of_queries, bool of_keys, const mixing_sums& sums) {
        of_queries_ = of_queries && call_.wanted.queries.data();
        of_keys_ = of_keys && call_.wanted.keys.data();
        of_values_ = of_keys && call_.wanted.values.data();
        mixing_sums_ = &sums;
        for_each_query_block(task, [&] {
            if (of_queries_) std::fill_n(memory_.of_queries, s_.query_heads * max_queries * memory_.key_stride, T{0});
            for_each_key_block([&](const key_run& keys) { add(keys); });
            const auto& to = call_.wanted.queries;
            for (index_t a = 0; of_queries_ && a < s_.query_heads; ++a)
                for (index_t r = 0; r < block_.tokens.count; ++r)
                    write_row<false, T>(memory_.of_queries + (a * max_queries + r) * memory_.key_stride, to.shape().channels, scale_, T{0},
                                        to.row(task.batch, a, block_.token_of(r)), to.strides().channels);
        });
    }
    /// Adds the pairs of these queries and keys to a sum, head by head of each tile.
    void operator()(const talking_gradient_task& task, const pair_sum<T>& pairs) {
        by_ = pairs.by;
        for_each_query_block(task, [&] {
            for_each_key_block([&](const key_run& keys) {
                weigh(keys);
                for (index_t c = 0; c < s_.heads; ++c) {
                    const pair_task<T> plane{&pairs, {pairs.to.shape(), task.batch, c}, {}, {}};
                    add_pairs<T>(plane, block_.of_head(c), keys, tile(memory_.of_scores, c), stride(), memory_.scratch);
                }
            });
        });
    }
    /// Begins some keys, before the first query block; end_keys comes after the last.
    void begin_keys(index_t batch, const row_range& rows) {
        for (const auto* to : {&call_.wanted.keys, &call_.wanted.values})
            for (index_t h = 0; h < to->shape().heads; ++h) summed_rows<T>::clear(*to, batch, h, rows);
    }
    void end_keys(index_t batch, const row_range& rows) {
        const auto &keys = call_.wanted.keys, &values = call_.wanted.values;
        for (index_t h = 0; h < keys.shape().heads; ++h) memory_.of_keys.scale(keys, batch, h, rows, scale_);
        for (index_t h = 0; h < values.shape().heads; ++h) memory_.of_values.scale(values, batch, h, rows, T{1});
    }

private:
    /// Calls f() for the query blocks of a task.
    void for_each_query_block(const talking_gradient_task& task, const auto& f) {
        task_ = task;
        const auto first_query = call_.in.positions.first_query[task.batch], n = call_.in.queries.shape().tokens;
        for (auto t = task.first_block; t < task.end_block; ++t) {
            const auto tokens = tile_at(t, first_query, n, max_queries, task.step, query_block_traits<T>::unit);
            block_ = {.batch = task.batch, .heads = s_.heads, .tokens = tokens, .first_row = tokens.first - first_query};
            finite_queries_ = copy(memory_.query_rows, memory_.key_stride, call_.in.queries.numbers());
            finite_d_out_ = copy(memory_.d_out_rows, memory_.value_stride, call_.d_out.values);
            for (index_t a = 0; a < s_.query_heads; ++a) memory_.queries[a].begin(block_.of_head(a), call_.in.queries, scale_);
            for (index_t e = 0; e < s_.value_heads; ++e) memory_.d_out[e].begin(block_.of_head(e), call_.d_out.values, 1);
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
        const key_blocks blocks(memory_type::keys_of_block, call_.in.positions.first_key[block_.batch] + task_.keys.first, task_.keys.count,
                                block_.tokens);
        const auto visit = [&](key_run keys) {
            all_visible_ = keys.full && block_.tokens.count == stride();
            keys.count = find_visible_heads(call_.pattern, block_, keys, s_.heads_alike, memory_.block_keys, memory_.visible, memory_.seen);
            if (keys.count == 0) return;
            compute(keys);
            f(keys);
        };
        for_each_visible_block(call_.pattern, block_, visible_keys::whole, blocks, blocks.first_block(), blocks.end_block(), visit);
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
    T* tile(T* all, index_t head) const { return all + head * memory_.head_stride; }
    T* delta_of(index_t head) const { return call_.delta + first_row(head); }
    T* share_of(index_t head) const { return call_.share + first_row(head); }
    head_block as_heads(const key_run& keys) const { return {keys.count, stride() / lanes::size, memory_.head_stride, seen()}; }
    const std::uint64_t* seen() const { return all_seen_ ? nullptr : memory_.seen; }

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
        const auto count = keys.count;
        for_each_head(call_.in.keys, memory_.keys, s_.query_heads, keys, [&](index_t a, index_t, const auto& rows) {
            memory_.queries[a].multiply(rows, count, all_visible_ ? nullptr : memory_.seen, tile(memory_.logits, a), no_prefetch());
        });
        all_seen_ = all_visible_;
        if (s_.mixes_logits) call_.mix.logits(as_heads(keys), memory_.logits, memory_.scores);
        for (index_t c = 0; c < s_.heads; ++c) {
            T* const scores = tile(memory_.scores, c);
            if (call_.slopes) (*call_.slopes)({block_.of_head(c), keys, scores, stride(), memory_.scratch}, tile(memory_.slopes, c), by_);
            if (!all_visible_) hide_scores<T>(scores, count, stride(), memory_.visible + (s_.heads_alike ? 0 : c) * memory_.block_keys);
        }
        all_seen_ = find_seen(memory_.scores, s_.heads, memory_.head_stride, count, stride(), memory_.seen);
        is_sparse_ = !all_seen_ && are_sparse<T>(memory_.seen, count, block_.tokens.count);
        if (s_.mixes_logits) forget_unseen(memory_.logits, s_.query_heads, count);
        for_each_head(call_.in.values, memory_.values, s_.value_heads, keys, [&](index_t e, index_t, const auto& rows) {
            memory_.d_out[e].multiply(rows, count, seen(), tile(memory_.of_mixed, e), no_prefetch());
        });
        forget_unseen(memory_.of_mixed, s_.value_heads, count);
        if (s_.mixes_weights) call_.back.weights(as_heads(keys), memory_.of_mixed, memory_.of_scores);
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

    /// P dP of one tile, and P: D is the mean of dP, so that what a row gives the bias of its scores cancels, as it should, although the
    /// sum of P is 1 only as far as log_sum_exp was rounded.
    void add_weighted(const key_run& keys) {
        for (index_t c = 0; c < s_.heads; ++c) {
            T *const weights = tile(memory_.scores, c), *const weighted = tile(memory_.of_scores, c);
            weigh_gradients<T>(memory_.rows[c], weights, weighted, nullptr, keys.count, stride());
            for (index_t row = 0; row < stride(); row += lanes::size) {
                lanes sum = T{0}, total = T{0};
                for (auto at = row; at < row + keys.count * stride(); at += stride()) {
                    sum = sum + lanes::load(weighted + at);
                    total = total + lanes::load(weights + at);
                }
                T *const sums = memory_.sums + c * max_queries + row, *const totals = memory_.totals + c * max_queries + row;
                (lanes::load(sums) + sum).store(sums);
                (lanes::load(totals) + total).store(totals);
            }
        }
    }
    /// Adds the products with the output: D = dO . out.
    void add_products_with_output() {
        const auto channels = call_.saved.values.shape().channels;
        for (index_t c = 0; c < s_.heads; ++c)
            for (index_t first = 0; first < channels; first += memory_.block_keys) {
                const auto count = std::min(memory_.block_keys, channels - first);
                const auto read = [&](const tensor_view<const T>& from, T* to) {
                    const auto rows = from.rows(block_.batch, c, block_.first_row).from(0, first);
                    transpose_rows<T>(rows.every(block_.tokens.step), block_.tokens.count, count, T{1}, to, stride());
                };
                T *const out = memory_.scratch, *const d_out = memory_.of_mixed, *const all = memory_.sums + c * max_queries;
                read(call_.saved.values, out);
                read(call_.d_out.values, d_out);
                for (index_t row = 0; row < stride(); row += lanes::size) {
                    auto sum = lanes::load(all + row);
                    for (index_t x = 0; x < count; ++x)
                        sum = fma(lanes::load(out + x * stride() + row), lanes::load(d_out + x * stride() + row), sum);
                    sum.store(all + row);
                }
            }
    }

    /// The weights of one tile, and the gradients of its scores.
    void weigh(const key_run& keys) const {
        for (index_t c = 0; c < s_.heads; ++c) {
            auto& rows = memory_.rows[c];
            for (index_t r = 0; r < block_.tokens.count; ++r) {
                rows.delta[r] = delta_of(c)[block_.token_of(r)];
                rows.share[r] = share_of(c)[block_.token_of(r)];
            }
            const T* const slopes = call_.slopes ? tile(memory_.slopes, c) : nullptr;
            weigh_gradients<T>(rows, tile(memory_.scores, c), tile(memory_.of_scores, c), slopes, keys.count, stride());
        }
    }
    /// What the pairs of one tile add to all gradients.
    void add(const key_run& keys) {
        weigh(keys);
        const auto count = keys.count;
        const auto heads = as_heads(keys);
        const auto& sums = *mixing_sums_;
        if (sums.weights_mix) add_head_products<T>(heads, memory_.of_mixed, s_.value_heads, memory_.scores, s_.heads, sums.weights_mix);
        if (sums.weights_bias) add_head_sums<T>(heads, memory_.of_mixed, s_.value_heads, sums.weights_bias);
        if (sums.logits_mix) add_head_products<T>(heads, memory_.of_scores, s_.heads, memory_.logits, s_.query_heads, sums.logits_mix);
        if (sums.logits_bias) add_head_sums<T>(heads, memory_.of_scores, s_.heads, sums.logits_bias);

        if (of_values_) {
            const auto wide = memory_.value_stride;
            if (s_.mixes_weights) call_.mix.weights(heads, memory_.scores, memory_.of_mixed);
            for (index_t e = 0; e < s_.value_heads; ++e)
                add_to_keys(tile(s_.mixes_weights ? memory_.of_mixed : memory_.scores, e), keys,
                            memory_.d_out_rows + e * max_queries * wide, wide, memory_.of_values, call_.wanted.values,
                            e * call_.in.values.shape().heads / s_.value_heads, finite_d_out_);
        }
        if (!of_queries_ && !of_keys_) return;
        T* const products = s_.mixes_logits ? memory_.logits : memory_.of_scores;
        if (s_.mixes_logits) call_.back.logits(heads, memory_.of_scores, products);
        for_each_head(call_.in.keys, memory_.keys, s_.query_heads, keys, [&](index_t a, index_t kv_head, const auto& rows) {
            const auto wide = memory_.key_stride;
            if (of_keys_)
                add_to_keys(tile(products, a), keys, memory_.query_rows + a * max_queries * wide, wide, memory_.of_keys, call_.wanted.keys,
                            kv_head, finite_queries_);
            if (of_queries_)
                add_products<T>({.a = {tile(products, a), 1, stride()},
                                 .b = rows,
                                 .depth = count,
                                 .c = {memory_.of_queries + a * max_queries * wide, wide, 1},
                                 .adds = true},
                                block_.tokens.count, wide, seen_beside(are_finite<T>(rows, count, wide)));
        });
    }
    /// What is told of a tile's pairs beside rows that are finite, or not.
    seen_pairs seen_beside(bool finite) const { return {finite && !is_sparse_ ? nullptr : memory_.seen, !finite}; }
    /// Adds the block's rows, weighted by a tile, to those of the keys.
    void add_to_keys(const T* weights, const key_run& keys, const T* rows, index_t row_stride, summed_rows<T>& sums,
                     const tensor_view<T>& to, index_t head, bool finite) const {
        sums.begin(to, block_.batch, head, keys.first - call_.in.positions.first_key[block_.batch], keys.step, keys.count);
        add_products<T>(
            {.a = {weights, stride(), 1}, .b = {rows, row_stride, 1}, .depth = block_.tokens.count, .c = sums.from(0), .adds = true},
            keys.count, row_stride, seen_beside(finite));
        sums.end();
    }

    const talking_gradient_call<T>& call_;
    const talking_heads_shape& s_;
    T scale_;
    memory_type memory_;
    talking_gradient_task task_{};
    query_block block_;
    bool finite_queries_ = true, finite_d_out_ = true;                ///< of the query block
    bool all_visible_ = false, all_seen_ = false, is_sparse_ = false; ///< of the tile
    const mixing_sums* mixing_sums_ = nullptr;
    derived_by by_{}; ///< what scores are derived by
    bool of_queries_ = false, of_keys_ = false, of_values_ = false;
};

} // namespace attn::kernel
