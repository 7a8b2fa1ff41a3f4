// One thread's work on the gradient of softmax attention: the keys of some rows, block by block, each with the query blocks that see it.
#pragma once

#include "../../core/gradients.hpp"
#include "../attend/key_reader.hpp"
#include "../attend/score_stage.hpp"
#include "../attend/visit.hpp"
#include "gradient_tile.hpp"
#include "score_slopes.hpp"
#include "summed_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a gradient of softmax attention is made of.
template <Scalar T>
struct softmax_gradient_call {
    const inputs<T>& in;
    const saved_outputs<T>& saved;
    const output_gradients<T>& d_out;
    const input_gradients<T>& wanted;
    const visible_keys& pattern;
    const score_slopes<T>* slopes; ///< none if scores stay as they are
    T scale;
    const T* share = nullptr; ///< of each row (batch, heads, n) what multiplies its weights; none: the scheduler finds it
    const T* delta = nullptr; ///< dL - D of each row (batch, heads, n)
};

/// Some query rows and some key rows of the heads that share a kv head, and whether the gradients of the queries, or of the keys and the
/// values, or both come of them: sums of queries need all keys, sums of keys all queries.
struct gradient_task {
    index_t batch, kv_head;
    row_range queries, keys;
    bool of_queries = false, of_keys = false;
};

/// Each gradient is one chain of multiply-adds: of a query over the keys in order, of a key over heads, passes and queries in order. So its
/// bits are the same in any task that computes it. A sum of pairs goes over batch entries, heads, passes and keys in order. Sums lie where
/// the gradients go, so that the memory of a worker does not grow with the call. Rows: what makes weights of adjusted scores, gradient_rows
/// or no_rows.
template <Scalar T, class Rows>
class softmax_gradient_worker {
public:
    using lanes = simd::lanes<T>;
    using traits = query_block_traits<T>;

    /// call: may be left out to tell how much memory there is to be.
    softmax_gradient_worker(detail::scratch& memory, const input_shapes& s, const softmax_gradient_call<T>* call = nullptr)
        : call_(call), key_stride_(whole_registers<T>(s.keys.channels)), value_stride_(whole_registers<T>(s.values.channels)),
          queries_(memory, s.keys.channels), d_out_(memory, s.values.channels), keys_(memory, block_keys, s.keys.channels, true),
          values_(memory, block_keys, s.values.channels, false), query_rows_(memory, traits::max_rows, s.keys.channels, true),
          d_out_rows_(memory, traits::max_rows, s.values.channels, true), of_queries_(memory, traits::max_rows, s.keys.channels),
          of_keys_(memory, block_keys, s.keys.channels), of_values_(memory, block_keys, s.values.channels),
          seen_(memory.take<std::uint64_t>(block_keys)) {
        for (T** tile : {&scores_, &products_, &slopes_, &scratch_}) *tile = memory.take<T>(block_keys * traits::max_rows);
    }

    void operator()(const gradient_task& task) {
        const auto heads = begin(task);
        const auto& wanted = call_->wanted;
        if (task.of_keys) {
            summed_rows<T>::clear(wanted.keys, task.batch, task.kv_head, task.keys);
            summed_rows<T>::clear(wanted.values, task.batch, task.kv_head, task.keys);
        }
        for (auto head = task.kv_head * heads; head < (task.kv_head + 1) * heads; ++head) {
            if (task.of_queries) summed_rows<T>::clear(wanted.queries, task.batch, head, task.queries);
            add_head(head);
            if (task.of_queries) of_queries_.scale(wanted.queries, task.batch, head, task.queries, call_->scale);
        }
        if (!task.of_keys) return;
        of_keys_.scale(wanted.keys, task.batch, task.kv_head, task.keys, call_->scale);
        of_values_.scale(wanted.values, task.batch, task.kv_head, task.keys, T{1});
    }
    /// Adds up the weights e^(x - log_sum_exp) of the task's queries in one head, with its keys: sums (n), in blocks of keys in order. Of
    /// blocks of queries none of which loses_sum, nothing is added.
    void add_weights(const gradient_task& task, index_t head, T* sums) {
        begin(task);
        sums_ = sums;
        add_head(head);
        sums_ = nullptr;
    }

    void operator()(const pair_task<T>& task) {
        const auto& s = call_->in.queries.shape();
        pairs_ = &task;
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t head = 0; head < s.heads; ++head) {
                const attn::detail::table_place place(task.sum->to.shape(), b, head);
                if (place.entry != task.place.entry || place.head != task.place.head) continue;
                const gradient_task own{b, head / (s.heads / call_->in.keys.shape().heads), task.queries, task.keys};
                begin(own);
                add_head(head);
            }
        pairs_ = nullptr;
    }

private:
    static constexpr index_t block_keys = 256;
    static constexpr bool is_softmax = std::same_as<Rows, gradient_rows<T>>;

    /// Begins a task. How many heads share its keys.
    index_t begin(const gradient_task& task) {
        task_ = &task;
        const auto& in = call_->in;
        keys_.begin(in.keys.rows(task.batch, task.kv_head), in.positions.first_key[task.batch]);
        values_.begin(in.values.rows(task.batch, task.kv_head), in.positions.first_key[task.batch]);
        return in.queries.shape().heads / in.keys.shape().heads;
    }
    void add_head(index_t head) {
        const auto& in = call_->in;
        query_rows_.begin(in.queries.rows(task_->batch, head), in.positions.first_query[task_->batch]);
        d_out_rows_.begin(call_->d_out.values.rows(task_->batch, head), in.positions.first_query[task_->batch]);
        for (index_t pass = 0; pass < call_->pattern.passes(); ++pass) {
            const auto step = call_->pattern.step(task_->batch, head, pass);
            for (index_t residue = 0; residue < std::min(step, task_->queries.count); ++residue) add_class(head, pass, residue, step);
        }
    }
    /// The queries of one residue class, with the keys that they share.
    void add_class(index_t head, index_t pass, index_t residue, index_t step) {
        const auto first_key = call_->in.positions.first_key[task_->batch];
        const query_tile all{call_->in.positions.first_query[task_->batch] + task_->queries.first + residue,
                             (task_->queries.count - residue + step - 1) / step, step};
        const key_blocks blocks(block_keys, first_key + task_->keys.first, task_->keys.count, all);
        for (auto block = blocks.first_block(); block < blocks.end_block(); ++block) {
            const auto run = blocks.run(block, block + 1);
            first_key_ = run.first;
            const auto sum_to = [&](summed_rows<T>& sums, const tensor_view<T>& to) {
                if (task_->of_keys && to.data()) sums.begin(to, task_->batch, task_->kv_head, run.first - first_key, run.step, run.count);
            };
            sum_to(of_keys_, call_->wanted.keys);
            sum_to(of_values_, call_->wanted.values);
            visit(head, pass, all, run);
            of_keys_.end();
            of_values_.end();
        }
    }
    /// The tiles of a class that see something of one block of keys.
    void visit(index_t head, index_t pass, const query_tile& all, const key_run& keys) {
        const auto rows = traits::rows_of(all.count);
        const auto block_of = [&](index_t from, index_t end) {
            const auto tile = [&](index_t t) { return tile_at(t, 0, all.count, rows, 1, traits::unit); };
            const auto first = tile(from), last = tile(end - 1);
            const auto tokens = all.part(first.first, last.first + last.count - first.first);
            return query_block{.batch = task_->batch,
                               .first_head = head,
                               .kv_head = task_->kv_head,
                               .tokens = tokens,
                               .first_row = tokens.first - call_->in.positions.first_query[task_->batch]};
        };
        const auto box = [&](index_t from, index_t end) { return call_->pattern.of_box(block_of(from, end), pass, keys.positions()); };
        for_each_visible(0, tile_count(all.count, rows), box, [&](index_t tile, bool full) {
            const auto block = block_of(tile, tile + 1);
            auto asked = keys;
            asked.full = full;
            const auto run = visible_run_of(call_->pattern, block, pass, asked, seen_);
            if (run.keys.count > 0) add(block, run.keys, run.rows);
        });
    }
    /// What the pairs of one tile add to all gradients.
    void add(const query_block& block, const key_run& keys, const std::uint64_t* visible) {
        const auto& in = call_->in;
        const auto& d_out = call_->d_out;
        const auto& wanted = call_->wanted;
        const auto* const slopes = call_->slopes;
        const auto known = rows_at(block);
        if constexpr (is_softmax)
            if (sums_ && std::ranges::none_of(known.log_sum_exp, loses_sum<T>)) return;
        const auto rows = block.rows(), count = keys.count;
        const auto k = keys_.read(keys);
        queries_.begin(block, in.queries, call_->scale);
        const auto stride = queries_.stride();
        queries_.multiply(k, count, visible, scores_, no_prefetch());
        if (slopes) (*slopes)({block, keys, scores_, stride, scratch_}, slopes_, pairs_ ? pairs_->sum->by : derived_by{});
        if (visible) hide_scores<T>(scores_, count, stride, visible);
        if constexpr (is_softmax)
            if (sums_) return add_to_sums(block, known, count, stride);
        d_out_.begin(block, d_out.values, 1);
        d_out_.multiply(values_.read(keys), count, visible, products_, no_prefetch());

        if (pairs_) {
            weigh_gradients<T>(known, scores_, products_, slopes_, count, stride);
            return add_pairs<T>(*pairs_, block, keys, products_, stride, scratch_);
        }
        const key_run tokens{block.tokens.first, rows, block.tokens.step, false};
        const auto q = query_rows_.read(tokens), d_out_rows = d_out_rows_.read(tokens);
        // 0 times NaN is NaN: beside such numbers, hidden pairs are left out one by one.
        const bool careful = !(are_finite<T>(k, count, key_stride_) && are_finite<T>(q, rows, key_stride_) &&
                               are_finite<T>(d_out_rows, rows, value_stride_));
        for (index_t j = 0; careful && j < count; ++j) seen_[j] = rows_not_hidden<T>(scores_ + j * stride, stride) & bit_range(0, rows);
        weigh_gradients<T>(known, scores_, products_, slopes ? slopes_ : nullptr, count, stride);

        const auto pairs = careful                                          ? seen_pairs{seen_, true}
                           : visible && are_sparse<T>(visible, count, rows) ? seen_pairs{visible}
                                                                            : seen_pairs{};
        const auto key = (keys.first - first_key_) / keys.step;
        const auto add_to = [&](summed_rows<T>& sums, index_t row, index_t of_rows, const row_block<const T>& a, const auto& b,
                                index_t depth) {
            add_products<T>({.a = a, .b = b, .depth = depth, .c = sums.from(row), .adds = true}, of_rows, sums.width(), pairs);
        };
        if (task_->of_keys && wanted.values.data()) add_to(of_values_, key, count, {scores_, stride, 1}, d_out_rows, rows);
        if (task_->of_keys && wanted.keys.data()) add_to(of_keys_, key, count, {products_, stride, 1}, q, rows);
        if (!task_->of_queries) return;
        of_queries_.begin(wanted.queries, task_->batch, block.first_head, block.first_row, tokens.step, rows);
        add_to(of_queries_, 0, rows, {products_, 1, stride}, k, count);
        of_queries_.end();
    }
    /// Adds the weights of one tile to the sums of those rows whose log_sum_exp does not tell them.
    void add_to_sums(const query_block& block, const gradient_rows<T>& known, index_t count, index_t stride) {
        T of_rows[max_block_rows] = {};
        kernel::add_weights<T>(known, scores_, count, stride, of_rows);
        for (index_t r = 0; r < block.rows(); ++r)
            if (loses_sum(known.log_sum_exp[r])) sums_[block.token_of(r)] += of_rows[r];
    }

    Rows rows_at(const query_block& block) const {
        Rows rows{};
        if constexpr (is_softmax) {
            const auto& s = call_->in.queries.shape();
            const auto first = (block.batch * s.heads + block.first_head) * s.tokens;
            for (index_t r = 0; r < block.rows(); ++r) {
                const auto token = block.token_of(r);
                rows.log_sum_exp[r] = call_->saved.log_sum_exp(block.batch, block.first_head, token, 0);
                if (sums_) continue; // the rest is not known yet
                rows.share[r] = call_->share[first + token];
                rows.delta[r] = call_->delta[first + token];
            }
        }
        return rows;
    }

    const softmax_gradient_call<T>* call_;
    const gradient_task* task_ = nullptr;
    const pair_task<T>* pairs_ = nullptr; ///< or sums of pairs instead
    T* sums_ = nullptr;                   ///< or those of weights, of a head's queries
    index_t first_key_ = 0;               ///< the position of the first key of the block
    index_t key_stride_, value_stride_;
    score_stage<T> queries_, d_out_;
    block_reader<T> keys_, values_, query_rows_, d_out_rows_;
    summed_rows<T> of_queries_, of_keys_, of_values_;                                    ///< of the tile and of the block of keys
    std::uint64_t* seen_;                                                                ///< [block_keys]
    T *scores_ = nullptr, *products_ = nullptr, *slopes_ = nullptr, *scratch_ = nullptr; ///< [keys][rows]
};

} // namespace attn::kernel
