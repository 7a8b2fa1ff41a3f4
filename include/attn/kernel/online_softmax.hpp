// The mergeable state of a softmax: running maximum, running sum and unnormalised output of a panel of queries.
#pragma once

#include "../core/workspace.hpp"
#include "../simd/exp.hpp"
#include "matrix_tile.hpp"

#include <cmath>
#include <limits>
#include <numbers>

namespace attn::kernel {

/// What a hidden key scores. Finite, so that no difference of scores is NaN by itself.
template <Scalar T>
inline constexpr T hidden_score = std::numeric_limits<T>::lowest();

/// Where running maxima begin: hidden scores lie so far below that their weights are exactly 0, real scores above.
template <Scalar T>
inline constexpr T lowest_maximum = std::numeric_limits<T>::lowest() / 2;

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

    index registers = 0;     ///< queries in the panel, in registers
    index value_stride = 0;  ///< numbers between rows of `values`: value channels padded to whole registers
    T* maximum = nullptr;    ///< m [queries]
    T* next_maximum = nullptr; ///< m [queries] once the scores at hand are pushed
    T* sum = nullptr;        ///< l [queries]
    T* factor = nullptr;     ///< [queries] what the last push multiplies earlier sums with
    T* values = nullptr;     ///< o [queries][value_stride]

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
    void reset(index panel_registers) {
        registers = panel_registers;
        const auto queries = registers * lanes::size;
        std::fill_n(maximum, queries, lowest_maximum<T>);
        std::fill_n(next_maximum, queries, lowest_maximum<T>);
        std::fill_n(sum, queries, T{0});
        std::fill_n(values, queries * value_stride, T{0});
    }

    /// Raises the maxima to scores[rows][queries], before they become weights.
    void raise_maximum(const T* scores, index rows) {
        each_columns([&]<int Columns>(index first) {
            lanes m[Columns];
            simd::unroll<Columns>([&](auto c) { m[c] = lanes::load(next_maximum + (first + c) * lanes::size); });
            for (index j = 0; j < rows; ++j)
                simd::unroll<Columns>([&](auto c) { m[c] = max_or_second(lanes::load(scores + (j * registers + first + c) * lanes::size), m[c]); });
            simd::unroll<Columns>([&](auto c) { m[c].store(next_maximum + (first + c) * lanes::size); });
        });
    }
    /// Takes in scores[rows][queries], to which the maxima have been raised: leaves weights 2^(x - m) in place of the scores, and the
    /// factor by which `values` must be multiplied before weighted values are added to it. Everything is vertical: a lane is a query.
    void push_scores(T* scores, index rows) {
        each_columns([&]<int Columns>(index first) {
            lanes m[Columns], l[Columns];
            simd::unroll<Columns>([&](auto c) {
                const auto at = (first + c) * lanes::size;
                m[c] = lanes::load(next_maximum + at);
                const lanes shrink = simd::exp2_nonpositive(lanes::load(maximum + at) - m[c]);
                shrink.store(factor + at);
                m[c].store(maximum + at);
                l[c] = lanes::load(sum + at) * shrink;
            });
            for (index j = 0; j < rows; ++j) {
                simd::unroll<Columns>([&](auto c) {
                    T* const x = scores + (j * registers + first + c) * lanes::size;
                    const lanes weight = simd::exp2_nonpositive(lanes::load(x) - m[c]);
                    weight.store(x);
                    l[c] = l[c] + weight;
                });
            }
            simd::unroll<Columns>([&](auto c) { l[c].store(sum + (first + c) * lanes::size); });
        });
    }
    /// False if a value of NaN or infinity has come into the sums of the first `queries` rows, be it by a weight of 0.
    bool has_finite_values(index queries) const {
        lanes zero(T{0});
        for (index at = 0; at < queries * value_stride; at += lanes::size) zero = fma(lanes::load(values + at), lanes(T{0}), zero);
        constexpr auto all = (std::uint64_t{1} << lanes::size) - 1;
        return ((zero == lanes(T{0})).bits().value & all) == all;
    }

    /// Ends the panel for query q with a sink (in natural units, -infinity for none) that adds exp(sink) to the denominator: the row of the
    /// output is `scale` times row q of `values`.
    struct row_result {
        T scale;           ///< 1 / l, or 0 if the query saw nothing
        T maximum, sum;    ///< with the sink taken in
        T sink;

        /// ln(l) + m ln(2).
        T log_sum_exp() const {
            if (scale == 0) return sink;
            return (maximum + std::log2(sum)) * std::numbers::ln2_v<T>;
        }
    };
    row_result finish(index q, T sink) const {
        if (sum[q] == 0) return {0, 0, 0, sink};
        if (sink == -std::numeric_limits<T>::infinity()) return {1 / sum[q], maximum[q], sum[q], sink};
        const T sink_score = sink * std::numbers::log2e_v<T>;
        const T top = std::max(maximum[q], sink_score);
        const T share = std::exp2(maximum[q] - top);
        const T total = sum[q] * share + std::exp2(sink_score - top);
        return {share / total, top, total, sink};
    }

private:
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
