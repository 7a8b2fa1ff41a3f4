// The mergeable state of a softmax: running maximum, running sum and unnormalised output of a panel of queries.
#pragma once

#include "../core/workspace.hpp"
#include "../simd/exp.hpp"
#include "matrix_tile.hpp"

#include <cmath>
#include <limits>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a hidden key scores. Finite, so that no difference of scores is NaN by itself.
template <Scalar T>
inline constexpr T hidden_score = std::numeric_limits<T>::lowest();

/// Where running maxima begin: hidden scores lie so far below that their weights are exactly 0, real scores above.
template <Scalar T>
inline constexpr T lowest_maximum = std::numeric_limits<T>::lowest() / 2;

/// Rows of a tile of scores, first .. last - 1.
struct row_range {
    index first = 0, last = 0;
};

/// (m, l, o) for each query of a panel, over the keys seen so far, with scores x in powers of two (log2(e) is part of the scale):
///     m = max x,   l = sum 2^(x - m),   o = sum 2^(x - m) v
/// The rules for rows that see nothing, for infinities and for NaN live here:
/// - a hidden key has weight 0 exactly, and so has a key whose score is -infinity;
/// - a query that sees no key has l = 0: its output is 0 and its log-sum-exp -infinity, or the sink's value;
/// - a NaN score makes l, and with it the whole row, NaN; maxima ignore it, so no other row notices.
template <Scalar T, class Arch>
struct online_softmax {
    using lanes = simd::lanes<T, Arch>;
    using traits = tile_traits<T, Arch>;

    index registers = 0;       ///< queries in the panel, in registers
    bool lone = false;         ///< one more query after them, whose scores are a row of their own
    index value_stride = 0;    ///< numbers between rows of `values`: value channels padded to whole registers
    T* maximum = nullptr;      ///< m [queries]
    T* next_maximum = nullptr; ///< m [queries] once the scores at hand are pushed
    T* sum = nullptr;          ///< l [queries]
    T* factor = nullptr;       ///< [queries] what the last push multiplies earlier sums with
    T* values = nullptr;       ///< o [queries][value_stride]

    static online_softmax take(detail::scratch& memory, index most_registers, index value_stride) {
        const auto queries = most_registers * lanes::size;
        online_softmax state;
        state.value_stride = value_stride;
        state.maximum = memory.take<T>(queries);
        state.next_maximum = memory.take<T>(queries);
        state.sum = memory.take<T>(queries);
        state.factor = memory.take<T>(queries);
        state.values = memory.take<T>(queries * value_stride);
        return state;
    }
    /// No key has been seen. What `values` holds is then nobody's: the first weighted values replace it.
    void reset(index panel_registers, bool lone_query = false) {
        registers = panel_registers;
        lone = lone_query;
        const auto queries = (registers + lone) * lanes::size;
        std::fill_n(maximum, queries, lowest_maximum<T>);
        std::fill_n(next_maximum, queries, lowest_maximum<T>);
        std::fill_n(sum, queries, T{0});
    }

    /// Raises the maxima to scores[rows][queries], before they become weights.
    void raise_maximum(const T* scores, index rows) {
        each_columns([&]<int Columns>(index first) {
            lanes m[static_cast<std::size_t>(Columns)];
            simd::unroll<Columns>([&](auto c) { m[c] = lanes::load(next_maximum + (first + c) * lanes::size); });
            for (index j = 0; j < rows; ++j)
                simd::unroll<Columns>(
                    [&](auto c) { m[c] = max_or_second(lanes::load(scores + (j * registers + first + c) * lanes::size), m[c]); });
            simd::unroll<Columns>([&](auto c) { m[c].store(next_maximum + (first + c) * lanes::size); });
        });
    }
    /// Takes in scores[rows][queries], to which the maxima have been raised: leaves weights 2^(x - m) in place of the scores, and the
    /// factor by which `values` must be multiplied before weighted values are added to it. Everything is vertical: a lane is a query.
    /// ahead: numbers beyond which the scores are prefetched, 0 for none.
    void push_scores(T* scores, index rows, index ahead = 0) {
        each_columns([&]<int Columns>(index first) {
            lanes m[static_cast<std::size_t>(Columns)], l[static_cast<std::size_t>(Columns)];
            simd::unroll<Columns>([&](auto c) {
                const auto at = (first + c) * lanes::size;
                m[c] = lanes::load(next_maximum + at);
                const lanes shrink = simd::exp2_nonpositive(lanes::load(maximum + at) - m[c]);
                shrink.store(factor + at);
                m[c].store(maximum + at);
                l[c] = lanes::load(sum + at) * shrink;
            });
            // What the stores might overlap would be read anew in each turn: so nothing but locals here.
            const index stride = registers * lanes::size, next = ahead, begin = first * lanes::size;
            T* const table = scores;
            for (index at = begin, end = begin + rows * stride; at != end; at += stride) {
                simd::unroll<Columns>([&](auto c) {
                    T* const x = table + at + c * lanes::size;
                    const lanes weight = simd::exp2_nonpositive(lanes::load(x) - m[c]);
                    weight.store(x);
                    if (next > 0) simd::prefetch(x + next);
                    l[c] = l[c] + weight;
                });
            }
            simd::unroll<Columns>([&](auto c) { l[c].store(sum + (first + c) * lanes::size); });
        });
    }
    /// The same where the queries of register r see none of the rows outside of seen[r]: their weight is 0, whatever the scores are.
    void push_seen_scores(T* scores, index rows, const row_range* seen) {
        for (index reg = 0; reg < registers; ++reg) push_register(scores, rows, reg, seen[reg]);
    }
    /// Ends the panel: row q of the output is last_factor[q] * values[q]. The sink, in natural units and -infinity for none, adds exp(sink)
    /// to every denominator, as a key without a value would.
    void finish(T sink) { finish(sink, factor); }
    void finish(T sink, T* last_factor) {
        const bool has_sink = sink > -std::numeric_limits<T>::infinity();
        const lanes sink_score = has_sink ? sink * std::numbers::log2e_v<T> : lowest_maximum<T>, sink_weight = has_sink ? T{1} : T{0};
        for (index at = 0; at < (registers + lone) * lanes::size; at += lanes::size)
            merge_register(at, sink_score, sink_weight).store(last_factor + at);
    }
    /// Ends the panel of a later set of keys, after an earlier set whose m and l were earlier_maximum and earlier_sum: row q of the
    /// output becomes earlier_sum[q] * row q so far + factor[q] * values[q].
    void finish_after(const T* earlier_maximum, T* earlier_sum) {
        for (index at = 0; at < (registers + lone) * lanes::size; at += lanes::size) {
            const lanes m = lanes::load(earlier_maximum + at), l = lanes::load(earlier_sum + at);
            merge_register(at, m, l).store(factor + at);
            const lanes weight = l * simd::exp2_nonpositive(m - lanes::load(maximum + at)), total = lanes::load(sum + at);
            select(total == lanes(T{0}), lanes(T{0}), weight / total).store(earlier_sum + at);
        }
    }
    /// ln(l) + m ln(2) of a finished row.
    T log_sum_exp(index q) const {
        return sum[q] == 0 ? -std::numeric_limits<T>::infinity() : (maximum[q] + std::log2(sum[q])) * std::numbers::ln2_v<T>;
    }

private:
    void push_register(T* scores, index rows, index reg, row_range seen) {
        const auto at = reg * lanes::size, stride = registers * lanes::size;
        const lanes m = lanes::load(next_maximum + at), shrink = simd::exp2_nonpositive(lanes::load(maximum + at) - m);
        shrink.store(factor + at);
        m.store(maximum + at);
        lanes l = lanes::load(sum + at) * shrink;
        T* x = scores + at;
        index j = 0;
        for (; j < seen.first; ++j, x += stride) lanes(T{0}).store(x);
        for (; j < seen.last; ++j, x += stride) {
            const lanes weight = simd::exp2_nonpositive(lanes::load(x) - m);
            weight.store(x);
            l = l + weight;
        }
        for (; j < rows; ++j, x += stride) lanes(T{0}).store(x);
        l.store(sum + at);
    }
    /// Takes (m, l) of other keys into one register of rows; what their own values are to be multiplied with in the end.
    lanes merge_register(index at, lanes other_maximum, lanes other_sum) {
        const lanes m = lanes::load(maximum + at), l = lanes::load(sum + at);
        const lanes top = max_or_second(other_maximum, m);
        const lanes weight = simd::exp2_nonpositive(m - top);
        const lanes total = fma(other_sum, simd::exp2_nonpositive(other_maximum - top), l * weight);
        top.store(maximum + at);
        total.store(sum + at);
        return select(total == lanes(T{0}), lanes(T{0}), weight / total);
    }
    /// f<Columns>(first) for the panel's registers, a micro-kernel's columns at a time.
    template <class F>
    void each_columns(F&& f) {
        for_each_piece(registers, traits::max_columns, [&](index first, index columns) {
            with_constant<traits::max_columns>(columns, [&](auto c) { f.template operator()<c()>(first); });
        });
    }
};

/// Merges results over disjoint sets of keys: rows a and b of outputs with log-sum-exps l_a and l_b become
///     a e^(l_a - l) + b e^(l_b - l),   l = ln(e^l_a + e^l_b).
/// A row whose log-sum-exp is -infinity saw nothing and adds nothing; NaN stays NaN.
template <Scalar T>
struct merge_weights {
    T a, b, log_sum_exp;

    merge_weights(T l_a, T l_b) {
        const T top = std::isnan(l_a) || std::isnan(l_b) ? std::numeric_limits<T>::quiet_NaN() : std::max(l_a, l_b);
        if (top == -std::numeric_limits<T>::infinity()) {
            a = b = 0;
            log_sum_exp = top;
            return;
        }
        a = std::exp(l_a - top);
        b = std::exp(l_b - top);
        log_sum_exp = top + std::log(a + b);
        const T total = a + b;
        a /= total;
        b /= total;
    }
};

} // namespace attn::kernel
