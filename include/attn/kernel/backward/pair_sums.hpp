// Sums of the gradients of pairs over tables, rows, keys or distances: what gradients of a score function's parameters are made of.
#pragma once

#include "../../core/tensor_view.hpp"
#include "../../score/score_function.hpp"
#include "../../simd/wide_sum.hpp"
#include "../attend/query_block.hpp"
#include "../tile_loader.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// By what scores are derived: what function number `function` of a chain makes of them, -1 for the scores that come in; or, of that
/// function, its number `parameter`.
struct derived_by {
    index_t function = -1, parameter = -1;
};

/// Where the gradients of pairs are added: to(entry, head, query position - first_query, key position - first_key), with an extent of 1 for
/// all queries or keys, and entries and heads repeated.
template <Scalar T>
struct pair_sum {
    derived_by by;
    tensor_view<T> to;
    per_batch first_query = 0, first_key = 0;
    bool in_one = false; ///< pairs of different queries come to the same numbers
};

/// One plane of such sums: all batch entries and heads that it was repeated for, and some query rows and key rows.
template <Scalar T>
struct pair_task {
    const pair_sum<T>* sum;
    attn::detail::table_place place;
    row_range queries, keys; ///< rows
};

/// Adds a tile of gradients, which lies key by key while a table lies query by query. scratch: as much as a tile of whole registers of
/// keys.
template <Scalar T>
void add_pairs(const pair_task<T>& task, const query_block& block, const key_run& keys, const T* tile, index_t stride, T* scratch) {
    using lanes = simd::lanes<T>;
    const auto& [by, to, first_query, first_key, in_one] = *task.sum;
    const auto scratch_stride = whole_registers<T>(keys.count);
    transpose_rows<T>(row_block<const T>{tile, stride, 1}, keys.count, block.rows(), T{1}, scratch, scratch_stride);
    const bool one_row = to.shape().tokens == 1, one_key = to.shape().channels == 1;
    const auto column = one_key ? 0 : keys.first - first_key.repeated(block.batch), step = one_key ? 0 : keys.step * to.strides().channels;
    for (index_t r = 0; r < block.rows(); ++r) {
        const auto query = block.tokens.first + r * block.tokens.step - first_query.repeated(block.batch);
        const T* const from = scratch + r * scratch_stride;
        T* const row = &to(task.place.entry, task.place.head, one_row ? 0 : query, column);
        index_t j = 0;
        if (one_key) {
            simd::wide_sum<T> all;
            simd::for_each_part<T>(keys.count,
                                   [&](index_t c, auto part, index_t) { all.add(part, load_channels<T>(from, 1, c, keys.count - c)); });
            *row += all.total();
            continue;
        }
        if (step == 1) {
            for (; j + lanes::size <= keys.count; j += lanes::size) (lanes::load(row + j) + lanes::load(from + j)).store(row + j);
        }
        for (; j < keys.count; ++j) row[j * step] += from[j];
    }
}

/// Finds sums of a call, one after the other, and has memory for them.
template <Scalar T>
class pair_summation {
public:
    /// Adds to sum.to, which is zeros.
    virtual void operator()(const pair_sum<T>& sum) const = 0;

    input_shapes shapes;
    positions where;
    T* memory; ///< (batch, heads, n + m)

protected:
    pair_summation(const input_shapes& s, const positions& at, T* of_sums) : shapes(s), where(at), memory(of_sums) {}
    ~pair_summation() = default;

    /// Whether no two parts of a plane's rows, or of its columns, come to the same number: that is so where all batch entries that share a
    /// plane stand at the same positions.
    bool has_parts(const pair_sum<T>& sum) const {
        const bool aligned = where.first_query.shared() && where.first_key.shared() && sum.first_query.shared() && sum.first_key.shared();
        return (aligned || sum.to.shape().batch == shapes.queries.batch) && !sum.in_one;
    }
};

/// What a score function finds the gradients of its parameters with. has_slopes: it has a parameter_slope.
template <Scalar T, bool has_slopes>
class parameter_sums {
public:
    parameter_sums(const pair_summation<T>& find, index_t function) : find_(find), function_(function) {}

    static void clear(const tensor_view<T>& view) { detail::fill_zero(view); }
    /// A table that is added: (entries, heads or 1, queries or 1, keys or 1), as an additive_bias has it.
    void of_table(const tensor_view<T>& to, const per_batch& first_query, const per_batch& first_key) const {
        if (!to.data()) return;
        clear(to);
        find_({{function_, -1}, to, first_query, first_key});
    }
    /// Parameter `number` of the function, one for each head or for all: to is (1, heads or 1, 1, 1).
    void of_number(index_t number, const tensor_view<T>& to) const {
        static_assert(has_slopes, "attn: a score function whose numbers have gradients needs a parameter_slope(number, score, query, key)");
        if (!to.data()) return;
        const auto rows = by_query({function_, number});
        for (index_t head = 0; head < to.shape().heads; ++head) {
            const auto own = to.shape().heads == 1 ? rows : rows.slice({.heads = {head, 1}});
            double sum = 0;
            detail::for_each_row(own.shape(), [&](index_t b, index_t h, index_t i) { sum += static_cast<double>(own(b, h, i, 0)); });
            to(0, head, 0, 0) = static_cast<T>(sum);
        }
    }
    /// Calls f(batch, head, position, sum) for the sum over all keys of each query.
    void for_each_query(const auto& f) const { for_each(by_query({function_, -1}), find_.where.first_query, f); }
    /// Calls f(batch, head, position, sum) for the sum over all queries of each key.
    void for_each_key(const auto& f) const {
        const auto& s = find_.shapes;
        const shape size{s.queries.batch, s.queries.heads, 1, s.keys.tokens};
        fill(size.size());
        const auto to = head_major(find_.memory, size);
        find_({{function_, -1}, to, 0, find_.where.first_key});
        for_each(to, find_.where.first_key, f);
    }
    /// Calls f(batch, head, j - i, sum) for the sum over all pairs of each distance j - i, from the most behind to the most ahead.
    void for_each_distance(const auto& f) const {
        const auto& s = find_.shapes;
        const auto batch = s.queries.batch, heads = s.queries.heads, n = s.queries.tokens, m = s.keys.tokens,
                   each = std::max<index_t>(0, n + m - 1);
        fill(batch * heads * each);
        if (n == 0 || m == 0) return;
        const tensor_view<T> diagonals(find_.memory + (n - 1), {batch, heads, n, m}, {heads * each, each, -1, 1});
        find_({{function_, -1}, diagonals, find_.where.first_query, find_.where.first_key, true});
        detail::for_each_row({batch, heads, each, 1}, [&](index_t b, index_t h, index_t d) {
            f(b, h, find_.where.first_key[b] - find_.where.first_query[b] - (n - 1) + d, find_.memory[(b * heads + h) * each + d]);
        });
    }

private:
    void fill(index_t count) const { std::fill_n(find_.memory, count, T{0}); }
    tensor_view<T> by_query(const derived_by& by) const {
        const auto& s = find_.shapes;
        const shape size{s.queries.batch, s.queries.heads, s.queries.tokens, 1};
        fill(size.size());
        const auto to = head_major(find_.memory, size);
        find_({by, to, find_.where.first_query, 0});
        return to;
    }
    /// Of sums in one row or one column of each head.
    static void for_each(const tensor_view<T>& sums, const per_batch& first, const auto& f) {
        detail::for_each_number(sums.shape(),
                                [&](index_t b, index_t h, index_t i, index_t c) { f(b, h, first[b] + i + c, sums(b, h, i, c)); });
    }

    const pair_summation<T>& find_;
    index_t function_;
};

} // namespace attn::kernel
