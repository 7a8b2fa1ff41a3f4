// The mergeable state of a softmax: running maximum, running sum and unnormalised output of a panel of queries.
#pragma once

#include "../core/workspace.hpp"
#include "../simd/exp.hpp"
#include "matrix_tile.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a hidden key scores, and nothing else does: any finite score, the lowest too, is that of a key which is seen.
template <Scalar T>
inline constexpr T hidden_score = -std::numeric_limits<T>::infinity();

/// Where running maxima begin. Finite, so that a hidden score lies infinitely far below it and weighs exactly 0.
template <Scalar T>
inline constexpr T lowest_maximum = std::numeric_limits<T>::lowest();

/// Rows of a tile of scores, first .. last - 1.
struct row_range {
    index first = 0, last = 0;
};

/// (m, l, o) for each query of a panel, over the keys seen so far:
///     m = max x,   l = sum e^(x - m),   o = sum e^(x - m) v
/// e^y is computed as 2^(y log2(e)), and the factor comes after the subtraction: rounded into a score of 10000 it would change weights by
/// 4e-5, while the difference of two such scores is exact.
/// The rules for rows that see nothing, for infinities and for NaN live here:
/// - a hidden key has weight 0 exactly, and so has a key whose score is -infinity;
/// - a query that sees no key has l = 0: its output is 0 and its log-sum-exp -infinity, or the sink's value;
/// - a NaN score, or one of +infinity, makes l, and with it the whole row, NaN; maxima ignore NaN, so no other row notices;
/// - a sink of +infinity takes all of the weight: the output is 0 and the log-sum-exp +infinity. One of NaN makes NaN of the log-sum-exp, and
///   of the output where a key is seen.
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
    T* growth = nullptr;       ///< [queries] what o is too small by: 1, but a power of two where it would not be finite otherwise
    T* values = nullptr;       ///< o [queries][value_stride]

    static online_softmax take(detail::scratch& memory, index most_registers, index value_stride) {
        const auto queries = most_registers * lanes::size;
        online_softmax state;
        state.value_stride = value_stride;
        state.maximum = memory.take<T>(queries);
        state.next_maximum = memory.take<T>(queries);
        state.sum = memory.take<T>(queries);
        state.factor = memory.take<T>(queries);
        state.growth = memory.take<T>(queries);
        state.values = memory.take<T>(queries * value_stride);
        return state;
    }
    /// No key has been seen. What `values` holds is then nobody's: the first weighted values replace it.
    void reset(index panel_registers, bool lone_query = false) {
        registers = panel_registers;
        lone = lone_query;
        std::fill_n(growth, (registers + lone) * lanes::size, T{1});
        begin_again();
    }
    /// The same for the queries that are there, whose values keep their growth.
    void begin_again() {
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
    /// Takes in scores[rows][queries], to which the maxima have been raised: leaves weights e^(x - m) in place of the scores, and the
    /// factor by which `values` must be multiplied before weighted values are added to it. Everything is vertical: a lane is a query.
    /// ahead: numbers beyond which the scores are prefetched, 0 for none.
    void push_scores(T* scores, index rows, index ahead = 0) {
        each_columns([&]<int Columns>(index first) {
            lanes m[static_cast<std::size_t>(Columns)], l[static_cast<std::size_t>(Columns)];
            simd::unroll<Columns>([&](auto c) {
                const auto at = (first + c) * lanes::size;
                m[c] = lanes::load(next_maximum + at);
                const lanes shrink = weight_of(lanes::load(maximum + at), m[c]);
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
                    const lanes weight = weight_of(lanes::load(x), m[c]);
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
    /// So many keys, or fewer, may be seen by queries, one bit each, whose o is to be kept so small that it cannot overflow: a mean of values
    /// near the largest number is finite, but their sum is not.
    void grow(std::uint64_t queries, index keys) {
        const T small_enough = static_cast<T>(std::bit_ceil(2 * static_cast<std::uint64_t>(keys)));
        for (index q = 0; q < (registers + lone) * lanes::size; ++q)
            if (queries >> q & 1) growth[q] = small_enough;
    }
    /// Weights[rows][queries] for such an o.
    void shrink(T* weights, index rows) const {
        for (index at = 0; at < registers * lanes::size; at += lanes::size) {
            const lanes smaller = lanes(T{1}) / lanes::load(growth + at);
            for (index j = 0; j < rows; ++j) {
                T* const weight = weights + j * registers * lanes::size + at;
                (lanes::load(weight) * smaller).store(weight);
            }
        }
    }
    /// Ends the panel: row q of the output is last_factor[q] * values[q]. The sink, -infinity for none, adds exp(sink) to every denominator,
    /// as a key without a value would.
    void finish(T sink) { finish(sink, factor); }
    void finish(T sink, T* last_factor) {
        const bool has_sink = sink != -std::numeric_limits<T>::infinity();
        const lanes sink_score = has_sink ? sink : lowest_maximum<T>, sink_weight = has_sink ? T{1} : T{0};
        for (index at = 0; at < (registers + lone) * lanes::size; at += lanes::size)
            merge_register(at, sink_score, sink_weight).store(last_factor + at);
    }
    /// Ends the panel of a later set of keys, after an earlier set whose m and l were earlier_maximum and earlier_sum: row q of the
    /// output becomes earlier_sum[q] * row q so far + factor[q] * values[q].
    void finish_after(const T* earlier_maximum, T* earlier_sum) {
        for (index at = 0; at < (registers + lone) * lanes::size; at += lanes::size) {
            const lanes m = lanes::load(earlier_maximum + at), l = lanes::load(earlier_sum + at);
            const auto sees_none = lanes::load(sum + at) == lanes(T{0});
            merge_register(at, m, l).store(factor + at);
            const lanes weight = l * share_of(m, lanes::load(maximum + at)), total = lanes::load(sum + at);
            select(sees_none, lanes(T{1}), weight / total).store(earlier_sum + at);
        }
    }
    /// m + ln(l) of a finished row.
    T log_sum_exp(index q) const {
        return sum[q] == 0 ? -std::numeric_limits<T>::infinity() : maximum[q] + std::log(sum[q]);
    }
    /// e^(score - top), where top is at least the score.
    [[gnu::always_inline]] static lanes weight_of(lanes score, lanes top) {
        return simd::exp2_nonpositive((score - top) * lanes(std::numbers::log2e_v<T>));
    }

private:
    void push_register(T* scores, index rows, index reg, row_range seen) {
        const auto at = reg * lanes::size, stride = registers * lanes::size;
        const lanes m = lanes::load(next_maximum + at), shrink = weight_of(lanes::load(maximum + at), m);
        shrink.store(factor + at);
        m.store(maximum + at);
        lanes l = lanes::load(sum + at) * shrink;
        T* x = scores + at;
        index j = 0;
        for (; j < seen.first; ++j, x += stride) lanes(T{0}).store(x);
        for (; j < seen.last; ++j, x += stride) {
            const lanes weight = weight_of(lanes::load(x), m);
            weight.store(x);
            l = l + weight;
        }
        for (; j < rows; ++j, x += stride) lanes(T{0}).store(x);
        l.store(sum + at);
    }
    /// The same for the maximum of some keys and that of all, which may both be a sink's +infinity.
    static lanes share_of(lanes maximum, lanes top) { return select(maximum == top, lanes(T{1}), weight_of(maximum, top)); }
    /// Takes (m, l) of other keys into one register of rows; what their own values are to be multiplied with in the end.
    lanes merge_register(index at, lanes other_maximum, lanes other_sum) {
        const lanes m = lanes::load(maximum + at), l = lanes::load(sum + at);
        const lanes top = max_or_second(other_maximum, m);
        const lanes weight = share_of(m, top), total = fma(other_sum, share_of(other_maximum, top), l * weight);
        top.store(maximum + at);
        total.store(sum + at);
        return select(l == lanes(T{0}), lanes(T{0}), weight / total * lanes::load(growth + at));
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
/// A row whose log-sum-exp is -infinity saw nothing and adds nothing; one of +infinity, as a sink leaves it, outweighs what is finite; NaN
/// stays NaN.
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
        a = l_a == top ? T{1} : std::exp(l_a - top);
        b = l_b == top ? T{1} : std::exp(l_b - top);
        log_sum_exp = top + std::log(a + b);
        const T total = a + b;
        a /= total;
        b /= total;
    }
};

} // namespace attn::kernel
