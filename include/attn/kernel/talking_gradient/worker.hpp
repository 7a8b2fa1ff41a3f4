// One thread's work on the gradient of talking-heads attention: query blocks, each with the key blocks that any head sees, all heads
// together.
#pragma once

#include "tiles.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Each gradient of a token is one chain of multiply-adds: of a query over the keys in order, of a key over query blocks, heads and queries
/// in order. So its bits are the same in any task that computes it.
template <Scalar T>
class talking_gradient_worker : talking_gradient_tiles<T> {
public:
    using tiles = talking_gradient_tiles<T>;
    using lanes = simd::lanes<T>;
    using tiles::max_queries;

    talking_gradient_worker(detail::scratch& memory, const talking_gradient_call<T>& call) : tiles(memory, call) {}

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
                    const T weights = memory_.totals[at] + call_.weight_of_sink(task.batch, c, row),
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
            for (index_t a = 0; of_queries_ && a < s_.query_heads; ++a)
                for (index_t r = 0; r < block_.tokens.count; ++r)
                    write(memory_.of_queries + (a * max_queries + r) * memory_.key_stride, call_.wanted.queries, a, block_.token_of(r),
                          call_.scale);
        });
    }
    /// Begins some keys, before the first query block; end_keys comes after the last.
    void begin_keys(index_t batch, index_t first, index_t end) {
        for (const auto* to : {&call_.wanted.keys, &call_.wanted.values})
            for (index_t h = 0; h < to->shape().heads; ++h) summed_rows<T>::clear(*to, batch, h, first, end - first);
    }
    void end_keys(index_t batch, index_t first, index_t end) {
        const auto &keys = call_.wanted.keys, &values = call_.wanted.values;
        for (index_t h = 0; h < keys.shape().heads; ++h) memory_.of_keys.scale(keys, batch, h, first, end - first, call_.scale);
        for (index_t h = 0; h < values.shape().heads; ++h) memory_.of_values.scale(values, batch, h, first, end - first, T{1});
    }

private:
    using tiles::as_heads, tiles::call_, tiles::block_, tiles::finite_d_out_, tiles::finite_queries_, tiles::for_each_head,
        tiles::for_each_key_block, tiles::for_each_query_block, tiles::memory_, tiles::s_, tiles::seen, tiles::share_of, tiles::delta_of,
        tiles::stride, tiles::task_, tiles::tile;

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

    /// What the pairs of one tile add to all gradients.
    void add(const key_run& keys) {
        const auto count = keys.count;
        for (index_t c = 0; c < s_.heads; ++c) {
            auto& rows = memory_.rows[c];
            for (index_t r = 0; r < block_.tokens.count; ++r) {
                rows.delta[r] = delta_of(c)[block_.token_of(r)];
                rows.share[r] = share_of(c)[block_.token_of(r)];
            }
            const T* const slopes = call_.slopes ? tile(memory_.slopes, c) : nullptr;
            weigh_gradients<T>(rows, tile(memory_.scores, c), tile(memory_.of_scores, c), slopes, count, stride());
        }
        const auto heads = as_heads(keys);
        const auto& sums = *mixing_sums_;
        if (sums.weights_mix) add_head_products<T>(heads, memory_.of_mixed, s_.value_heads, memory_.scores, s_.heads, sums.weights_mix);
        if (sums.weights_bias) add_head_sums<T>(heads, memory_.of_mixed, s_.value_heads, sums.weights_bias);
        if (sums.logits_mix) add_head_products<T>(heads, memory_.of_scores, s_.heads, memory_.logits, s_.query_heads, sums.logits_mix);
        if (sums.logits_bias) add_head_sums<T>(heads, memory_.of_scores, s_.heads, sums.logits_bias);

        if (of_values_) {
            const auto wide = memory_.value_stride;
            if (s_.mixes_weights) call_.weights_mix(heads, memory_.scores, memory_.of_mixed);
            for (index_t e = 0; e < s_.value_heads; ++e)
                add_to_keys(tile(s_.mixes_weights ? memory_.of_mixed : memory_.scores, e), keys,
                            memory_.d_out_rows + e * max_queries * wide, wide, memory_.of_values, call_.wanted.values,
                            e * call_.in.values.shape().heads / s_.value_heads, finite_d_out_);
        }
        if (!of_queries_ && !of_keys_) return;
        T* const products = s_.mixes_logits ? memory_.logits : memory_.of_scores;
        if (s_.mixes_logits) call_.logits_mix_back(heads, memory_.of_scores, products);
        for_each_head(call_.in.keys, memory_.keys, s_.query_heads, keys, [&](index_t a, index_t kv_head, const auto& rows) {
            const auto wide = memory_.key_stride;
            if (of_keys_)
                add_to_keys(tile(products, a), keys, memory_.query_rows + a * max_queries * wide, wide, memory_.of_keys, call_.wanted.keys,
                            kv_head, finite_queries_);
            if (of_queries_)
                add_products<T>({.a = tile(products, a),
                                 .a_row = 1,
                                 .a_depth = stride(),
                                 .b = rows.data,
                                 .b_depth = rows.row_stride,
                                 .depth = count,
                                 .c = memory_.of_queries + a * max_queries * wide,
                                 .c_row = wide,
                                 .adds = true},
                                block_.tokens.count, wide, are_finite<T>(rows, count, wide) ? nullptr : memory_.seen, true);
        });
    }
    /// Adds the block's rows, weighted by a tile, to those of the keys.
    void add_to_keys(const T* weights, const key_run& keys, const T* rows, index_t row_stride, summed_rows<T>& sums,
                     const tensor_view<T>& to, index_t head, bool finite) const {
        sums.begin(to, block_.batch, head, keys.first - call_.in.positions.first_key[block_.batch], keys.step, keys.count);
        T* const first = sums.row(0);
        add_products<T>({.a = weights,
                         .a_row = stride(),
                         .a_depth = 1,
                         .b = rows,
                         .b_depth = row_stride,
                         .depth = block_.tokens.count,
                         .c = first,
                         .c_row = sums.row_stride(),
                         .adds = true},
                        keys.count, row_stride, finite ? nullptr : memory_.seen, false);
        sums.end();
    }
    void write(const T* sums, const tensor_view<T>& to, index_t head, index_t row, T factor) const {
        write_row<false, T>(sums, to.shape().channels, factor, T{0}, to.row(task_.batch, head, row), to.strides().channels);
    }

    const mixing_sums* mixing_sums_ = nullptr;
    bool of_queries_ = false, of_keys_ = false, of_values_ = false;
};

} // namespace attn::kernel
