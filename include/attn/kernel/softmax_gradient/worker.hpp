// One thread's work on the gradient of softmax attention: the keys of some rows, block by block, each with the query blocks that see it.
#pragma once

#include "../../core/gradients.hpp"
#include "../softmax/key_reader.hpp"
#include "../softmax/score_stage.hpp"
#include "../softmax/visible_span.hpp"
#include "gradient_tile.hpp"
#include "score_slopes.hpp"
#include "seen_products.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a gradient of softmax attention is made of.
template <Scalar T>
struct softmax_gradient_call {
    const inputs<T>& in;
    const saved_outputs<T>& saved;
    const output_gradients<T>& given;
    const input_gradients<T>& wanted;
    const visible_keys& pattern;
    const score_slopes<T>* slopes; ///< none if scores stay as they are
    T scale;
    const T* shift;                ///< dL - D of each row (batch, heads, n)
};

/// Some query rows and some key rows of the heads that share a kv head, and whether the gradients of the queries, or of the keys and the values,
/// or both come of them: sums of queries need all keys, sums of keys all queries.
struct gradient_task {
    index_t batch, kv_head;
    index_t first_query, end_query, first_key, end_key; ///< rows
    bool of_queries, of_keys;
};

/// Each gradient is one chain of multiply-adds: of a query over the keys in order, of a key over heads, passes and queries in order. So its
/// bits are the same in any task that computes it. A sum of pairs goes over batch entries, heads, passes and
/// keys in order.
template <Scalar T, class Arch>
class softmax_gradient_worker {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = query_block_traits<T, Arch>;

    softmax_gradient_worker(detail::scratch& memory, const softmax_gradient_call<T>& call) : softmax_gradient_worker(memory, &call, shapes_of(call.in)) {}
    /// What it takes of the memory.
    static std::size_t bytes(const input_shapes& s) {
        detail::scratch memory;
        softmax_gradient_worker(memory, nullptr, s);
        return memory.used_bytes();
    }

    void operator()(const gradient_task& task) {
        const auto heads = begin(task), queries = task.end_query - task.first_query, keys = task.end_key - task.first_key;
        if (task.of_keys) {
            std::fill_n(of_keys_, keys * key_stride_, T{0});
            std::fill_n(of_values_, keys * value_stride_, T{0});
        }
        for (auto head = task.kv_head * heads; head < (task.kv_head + 1) * heads; ++head) {
            if (task.of_queries) std::fill_n(of_queries_, queries * key_stride_, T{0});
            add_head(head);
            if (task.of_queries) write(of_queries_, key_stride_, call_->wanted.queries, head, task.first_query, queries, call_->scale);
        }
        if (!task.of_keys) return;
        write(of_keys_, key_stride_, call_->wanted.keys, task.kv_head, task.first_key, keys, call_->scale);
        write(of_values_, value_stride_, call_->wanted.values, task.kv_head, task.first_key, keys, T{1});
    }

    void operator()(const pair_task<T>& task) {
        const auto& s = call_->in.queries.shape();
        pairs_ = &task;
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t head = 0; head < s.heads; ++head) {
                const attn::detail::table_place place(task.sum->to.shape(), b, head);
                if (place.entry != task.place.entry || place.head != task.place.head) continue;
                const gradient_task own{b, head / (s.heads / call_->in.keys.shape().heads), task.first_query, task.end_query, task.first_key, task.end_key,
                                        false, false};
                begin(own);
                add_head(head);
            }
        pairs_ = nullptr;
    }

private:
    static constexpr index_t block_keys = 256;

    softmax_gradient_worker(detail::scratch& memory, const softmax_gradient_call<T>* call, const input_shapes& s)
        : call_(call), key_stride_(whole_registers<T, Arch>(s.keys.channels)), value_stride_(whole_registers<T, Arch>(s.values.channels)),
          queries_(memory, s.keys.channels), given_(memory, s.values.channels), keys_(memory, block_keys, s.keys.channels, true),
          values_(memory, block_keys, s.values.channels, false), query_rows_(memory, traits::max_rows, s.keys.channels, true),
          given_rows_(memory, traits::max_rows, s.values.channels, true), seen_(memory.take<std::uint64_t>(block_keys)) {
        for (T** tile : {&scores_, &products_, &slopes_, &scratch_}) *tile = memory.take<T>(block_keys * traits::max_rows);
        of_queries_ = memory.take<T>(s.queries.tokens, key_stride_);
        of_keys_ = memory.take<T>(s.keys.tokens, key_stride_);
        of_values_ = memory.take<T>(s.keys.tokens, value_stride_);
    }

    /// How many heads share the keys.
    index_t begin(const gradient_task& task) {
        task_ = &task;
        const auto& in = call_->in;
        keys_.begin(rows_of(in.keys, task.batch, task.kv_head), in.positions.first_key[task.batch]);
        values_.begin(rows_of(in.values, task.batch, task.kv_head), in.positions.first_key[task.batch]);
        return in.queries.shape().heads / in.keys.shape().heads;
    }
    void add_head(index_t head) {
        const auto& in = call_->in;
        query_rows_.begin(rows_of(in.queries, task_->batch, head), in.positions.first_query[task_->batch]);
        given_rows_.begin(rows_of(call_->given.values, task_->batch, head), in.positions.first_query[task_->batch]);
        for (index_t pass = 0; pass < call_->pattern.passes(); ++pass) {
            const auto step = call_->pattern.step(task_->batch, head, pass);
            for (index_t residue = 0; residue < std::min(step, task_->end_query - task_->first_query); ++residue) add_class(head, pass, residue, step);
        }
    }
    /// The queries of one residue class, with the keys that they share.
    void add_class(index_t head, index_t pass, index_t residue, index_t step) {
        const auto first = call_->in.positions.first_query[task_->batch] + task_->first_query + residue;
        const query_tile all{first, (task_->end_query - task_->first_query - residue + step - 1) / step, step};
        const key_blocks blocks(block_keys, call_->in.positions.first_key[task_->batch] + task_->first_key, task_->end_key - task_->first_key, all);
        const auto rows = traits::rows_of(all.count);
        for (auto block = blocks.first_block(); block < blocks.end_block(); ++block)
            visit(head, pass, all, rows, 0, tile_count(all.count, rows), blocks.run(block, block + 1));
    }
    /// Tiles from .. end - 1 of a class, with one block of keys, found by bisection.
    void visit(index_t head, index_t pass, const query_tile& all, index_t rows, index_t from, index_t end, const key_run& keys) {
        const auto tile = [&](index_t t) { return tile_at(t, 0, all.count, rows, 1, lanes::size); };
        const auto first = tile(from), last = tile(end - 1);
        query_block block{.batch = task_->batch, .first_head = head, .kv_head = task_->kv_head, .tokens = all.part(first.first, last.first + last.count - first.first)};
        const auto seen = call_->pattern.of_box(block, pass, keys.positions());
        if (seen.is_none()) return;
        if (end - from > 1 && !seen.is_all()) {
            const auto middle = from + (end - from) / 2;
            visit(head, pass, all, rows, from, middle, keys);
            visit(head, pass, all, rows, middle, end, keys);
            return;
        }
        for (; from < end; ++from) {
            const auto own = tile(from);
            block.tokens = all.part(own.first, own.count);
            block.first_row = block.tokens.first - call_->in.positions.first_query[task_->batch];
            if (seen.is_all()) add(block, keys, nullptr);
            else add_visible(block, pass, keys);
        }
    }
    /// From the first key that some row sees to the last.
    void add_visible(const query_block& block, index_t pass, key_run keys) {
        auto* bits = seen_;
        call_->pattern.find(block, pass, keys, bits);
        while (keys.count > 0 && bits[keys.count - 1] == 0) --keys.count;
        for (; keys.count > 0 && *bits == 0; --keys.count, ++bits) keys.first += keys.step;
        if (keys.count > 0) add(block, keys, bits);
    }
    /// What the pairs of one tile add to all gradients.
    void add(const query_block& block, const key_run& keys, std::uint64_t* visible) {
        const auto& [in, saved, given, wanted, pattern, slopes, scale, shift] = *call_;
        no_prefetch ahead;
        const auto rows = block.rows(), count = keys.count;
        const auto k = keys_.read(keys);
        queries_.begin(block, in.queries, scale);
        const auto stride = queries_.stride();
        queries_.multiply(k, count, visible, scores_, ahead);
        if (slopes) (*slopes)({block, keys, scores_, stride, scratch_}, slopes_, pairs_ ? pairs_->sum->by : derived_by{});
        if (visible) hide_scores<T, Arch>(scores_, count, stride, visible);
        given_.begin(block, given.values, 1);
        given_.multiply(values_.read(keys), count, visible, products_, ahead);

        if (pairs_) {
            weigh_gradients<T, Arch>(rows_at(block), scores_, products_, slopes_, count, stride);
            return add_pairs<T, Arch>(*pairs_, block, keys, products_, stride, scratch_, block_keys);
        }
        const key_run tokens{block.tokens.first, rows, block.tokens.step, false};
        const auto q = query_rows_.read(tokens), d_out = given_rows_.read(tokens);
        // 0 times NaN is NaN: beside such numbers, hidden pairs are left out one by one.
        const bool careful = !(are_finite<T, Arch>(k, count, key_stride_) && are_finite<T, Arch>(q, rows, key_stride_) && are_finite<T, Arch>(d_out, rows, value_stride_));
        for (index_t j = 0; careful && j < count; ++j) seen_[j] = rows_not_hidden<T, Arch>(scores_ + j * stride, stride) & bit_range(0, rows);
        weigh_gradients<T, Arch>(rows_at(block), scores_, products_, slopes ? slopes_ : nullptr, count, stride);

        const auto query = block.first_row - task_->first_query, key = keys.first - in.positions.first_key[task_->batch] - task_->first_key;
        const auto add_to = [&](T* sums, index_t row, index_t of_rows, index_t step, index_t row_stride, const T* a, index_t a_row, index_t a_depth, const auto& b, index_t depth) {
            const tile_product<T> product{.a = a, .a_row = a_row, .a_depth = a_depth, .b = b.data, .b_depth = b.row_stride, .depth = depth,
                                          .c = sums + row * row_stride, .c_row = step * row_stride, .adds = true};
            add_products<T, Arch>(product, of_rows, row_stride, careful ? seen_ : nullptr, a_row == 1);
        };
        if (task_->of_keys && wanted.values.data()) add_to(of_values_, key, count, keys.step, value_stride_, scores_, stride, 1, d_out, rows);
        if (task_->of_keys && wanted.keys.data()) add_to(of_keys_, key, count, keys.step, key_stride_, products_, stride, 1, q, rows);
        if (task_->of_queries) add_to(of_queries_, query, rows, tokens.step, key_stride_, products_, 1, stride, k, count);
    }

    gradient_rows<T> rows_at(const query_block& block) const {
        gradient_rows<T> rows{};
        const auto& s = call_->in.queries.shape();
        const T* const shift = call_->shift + (block.batch * s.heads + block.first_head) * s.tokens;
        for (index_t r = 0; r < block.rows(); ++r) {
            rows.log_sum_exp[r] = call_->saved.log_sum_exp(block.batch, block.first_head, block.token_of(r), 0);
            rows.shift[r] = shift[block.token_of(r)];
        }
        return rows;
    }
    void write(const T* sums, index_t stride, const tensor_view<T>& to, index_t head, index_t first_row, index_t count, T factor) const {
        if (!to.data()) return;
        for (index_t r = 0; r < count; ++r)
            write_row<false, T, Arch>(sums + r * stride, to.shape().channels, factor, T{0}, to.row(task_->batch, head, first_row + r), to.strides().channels);
    }

    const softmax_gradient_call<T>* call_;
    const gradient_task* task_ = nullptr;
    const pair_task<T>* pairs_ = nullptr; ///< or sums of pairs instead
    index_t key_stride_, value_stride_;
    score_stage<T, Arch> queries_, given_;
    block_reader<T, Arch> keys_, values_, query_rows_, given_rows_;
    std::uint64_t* seen_; ///< [block_keys]
    T *scores_ = nullptr, *products_ = nullptr, *slopes_ = nullptr, *scratch_ = nullptr; ///< [keys][rows]
    T *of_queries_ = nullptr, *of_keys_ = nullptr, *of_values_ = nullptr;                ///< sums, rows of whole registers
};

} // namespace attn::kernel
