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
    T* sum = nullptr;        ///< l [queries]
    T* factor = nullptr;     ///< [queries] what the last push multiplies earlier sums with
    T* values = nullptr;     ///< o [queries][value_stride]

    static online_softmax take(detail::scratch& memory, index most_registers, index value_stride) {
        const auto queries = most_registers * lanes::size;
        online_softmax state;
        state.value_stride = value_stride;
        state.maximum = memory.take<T>(queries);
        state.sum = memory.take<T>(queries);
        state.factor = memory.take<T>(queries);
        state.values = memory.take<T>(queries * value_stride);
        return state;
    }
    void reset(index panel_registers) {
        registers = panel_registers;
        const auto queries = registers * lanes::size;
        std::fill_n(maximum, queries, lowest_maximum<T>);
        std::fill_n(sum, queries, T{0});
        std::fill_n(values, queries * value_stride, T{0});
    }

    /// Takes in scores[rows][queries]: moves m and l on, leaves weights 2^(x - m) in place of the scores, and the factor by which `values`
    /// must be multiplied before weighted values are added to it. Everything is vertical: a lane is a query.
    void push_scores(T* scores, index rows) {
        for_each_piece(registers, traits::max_columns, [&](index first, index columns) {
            with_constant<traits::max_columns>(columns, [&](auto c) { push_columns<c()>(scores, rows, first); });
        });
    }

    /// Ends the panel. Row q of the output is o / l, written by write(q, row of values, 1 / l); log_sum_exp(q, value) receives
    /// ln(l) + m ln(2). The sink (in natural units, -infinity for none) adds exp(sink) to the denominator.
    void finish(index queries, T sink, auto&& write) {
        constexpr T log2_e = std::numbers::log2e_v<T>, ln_2 = std::numbers::ln2_v<T>;
        for (index q = 0; q < queries; ++q) {
            T m = maximum[q], l = sum[q], share = 1;
            if (sink > -std::numeric_limits<T>::infinity()) {
                const T top = std::max(m, sink * log2_e);
                share = std::exp2(m - top);
                l = l * share + std::exp2(sink * log2_e - top);
                m = top;
            }
            const bool saw_nothing = sum[q] == 0;
            const T log_sum_exp = l == 0 ? -std::numeric_limits<T>::infinity() : saw_nothing ? sink : (m + std::log2(l)) * ln_2;
            write(q, values + q * value_stride, saw_nothing ? T{0} : share / l, log_sum_exp);
        }
    }

private:
    template <int Columns>
    void push_columns(T* scores, index rows, index first) {
        const auto stride = registers * lanes::size;
        T* const column = scores + first * lanes::size;
        const auto each = [&](auto&& f) { simd::unroll<Columns>([&](auto c) { f(c, (first + c) * lanes::size); }); };
        lanes m[Columns], l[Columns];
        each([&](auto c, index at) { m[c] = lanes::load(maximum + at); });
        for (index j = 0; j < rows; ++j) {
            each([&](auto c, index) { m[c] = max_or_second(lanes::load(column + j * stride + c * lanes::size), m[c]); });
        }
        each([&](auto c, index at) {
            const lanes shrink = simd::exp2_nonpositive(lanes::load(maximum + at) - m[c]);
            shrink.store(factor + at);
            m[c].store(maximum + at);
            l[c] = lanes::load(sum + at) * shrink;
        });
        for (index j = 0; j < rows; ++j) {
            each([&](auto c, index) {
                T* const x = column + j * stride + c * lanes::size;
                const lanes weight = simd::exp2_nonpositive(lanes::load(x) - m[c]);
                weight.store(x);
                l[c] = l[c] + weight;
            });
        }
        each([&](auto c, index at) { l[c].store(sum + at); });
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
