// The mergeable state of a softmax: running maximum, running sum and unnormalised output of a block of rows.
#pragma once

#include "../../core/workspace.hpp"
#include "../../simd/elementary.hpp"
#include "../../simd/exp.hpp"
#include "../../simd/transpose.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Joins the softmax of two disjoint sets of keys, each finished: out = o / l, with m and l. Their shares are
///     a = l_a e^(m_a - m) / l,   b = l_b e^(m_b - m) / l,   m = max(m_a, m_b),   l = l_a e^(m_a - m) + l_b e^(m_b - m)
/// and out = a out_a + b out_b. One that saw nothing (l = 0) leaves the other's bits alone; two of them make a row of zeros. A maximum of
/// +infinity takes all, NaN stays NaN.
template <Scalar T>
struct softmax_merge {
    using lanes = simd::lanes<T>;
    lanes maximum, sum, a, b;

    softmax_merge(lanes m_a, lanes l_a, lanes m_b, lanes l_b) {
        const lanes zero = T{0}, one = T{1};
        const auto no_a = l_a == zero, no_b = l_b == zero;
        if (no_a.bits() == simd::lane_bits::first(lanes::size)) { // as it is where keys begin, and the whole of a short call
            maximum = m_b;
            sum = l_b;
            a = zero;
            b = select(no_b, zero, one);
            return;
        }
        const auto top = max_or_second(m_a, m_b);
        const auto below = [&](lanes m) { return select(m == top, one, simd::exp_nonpositive(m - top)); };
        const auto weight_a = l_a * below(m_a), weight_b = l_b * below(m_b), both = weight_a + weight_b;
        maximum = select(no_a, m_b, select(no_b, m_a, top));
        sum = select(no_a, l_b, select(no_b, l_a, both));
        a = select(no_a, zero, select(no_b, one, weight_a / both));
        b = select(no_b, zero, select(no_a, one, weight_b / both));
    }
    /// ln(l) + m.
    static T log_sum_exp(T maximum, T sum) { return sum == 0 ? -std::numeric_limits<T>::infinity() : maximum + simd::log(sum); }
};

/// (m, l, o) for each row, over the keys seen so far, with scores x:
///     m = max x,   l = sum e^(x - m),   o = unit sum e^(x - m) v
/// The rules for rows that see nothing, for infinities and for NaN live here:
/// - a key whose score is -infinity has weight 0 exactly: so a pattern hides one, and so does a score function;
/// - m begins as the lowest finite number. A row that sees no key keeps it, and l = 0: its output is 0, its log-sum-exp -infinity;
/// - a NaN score makes l, and with it the whole row, NaN; maxima ignore it.
/// Every decision is a lane's own, and keys that a row does not see change none of its bits: its m stays, its factor is e^0 = 1, and what
/// is added to its l is 0.
template <Scalar T>
struct softmax_state {
    using lanes = simd::lanes<T>;
    using merge = softmax_merge<T>;
    static constexpr T nothing = std::numeric_limits<T>::lowest(), hidden = -std::numeric_limits<T>::infinity();

    index_t value_stride = 0; ///< numbers between rows of `values`: value channels padded to whole registers
    T* maximum = nullptr;     ///< m [rows]
    T* sum = nullptr;         ///< l [rows]
    T* factor = nullptr;      ///< [rows] what the last push multiplies o with
    T* unit = nullptr;        ///< [rows] 1, or a power of two below, which keeps o from growing too large
    T* values = nullptr;      ///< o [rows][value_stride]
    bool has_values = false;  ///< o has been written; until then it counts as 0

    static softmax_state take(detail::scratch& memory, index_t max_rows, index_t value_stride) {
        const auto rows = [&] { return memory.take<T>(max_rows); };
        T *const maximum = rows(), *const sum = rows(), *const factor = rows(), *const unit = rows();
        return {value_stride, maximum, sum, factor, unit, memory.take<T>(max_rows, value_stride)};
    }
    /// m and l of one row. (Not a std::pair, of whose passing gcc has a note for everyone who compiles for AArch64.)
    struct sums {
        T maximum, sum;
    };
    /// Those of a row that has seen no key. A sink per head, if there are any, is a key without a value that is there from the start.
    static sums at_start(std::span<const double> sinks, index_t head) {
        const T sink = sinks.empty() ? hidden : static_cast<T>(sinks[static_cast<std::size_t>(head)]);
        return sink == hidden ? sums{nothing, 0} : sums{sink, 1};
    }
    /// Begins rows of which no key has been seen.
    void begin(index_t rows, T of_values = 1) {
        std::fill_n(unit, rows, of_values);
        std::fill_n(maximum, rows, nothing);
        std::fill_n(sum, rows, T{0});
        has_values = false;
    }
    /// Takes in scores[keys][rows], which become weights e^(x - m), and leaves the factors by which `values` must be multiplied before the
    /// weighted values of these keys are added. rows: whole registers; or a power of two that is less than one, of which several keys' are
    /// a register. Where weights are multiplied as other operands, two of a row's in one, these take the place of scores, and l sums what
    /// they were rounded to: so it divides what it has weighed. visible: one bit per row and key, or null; registers whose rows see neither
    /// of two keys have weights of 0, of which no exponential is made.
    template <class E = T>
    const E* push(T* scores, index_t keys, index_t rows, const std::uint64_t* visible = nullptr) {
        if (rows < lanes::size) {
            push_together(scores, keys, rows);
            return reinterpret_cast<const E*>(scores);
        }
        for (index_t row = 0; row < rows; row += lanes::size) {
            T* const column = scores + row;
            const auto earlier = lanes::load(maximum + row), m = raised(earlier, column, keys, rows);
            const auto shrink = simd::exp_nonpositive(earlier - m);
            m.store(maximum + row);
            shrink.store(factor + row);
            fma(lanes::load(sum + row), shrink, weigh<E>(column, keys, rows, m, visible, row)).store(sum + row);
        }
        return reinterpret_cast<const E*>(scores);
    }

    /// What `from` knows of the rows whose bit is set.
    void copy(const softmax_state& from, std::uint64_t rows) const {
        for (; rows != 0; rows &= rows - 1) {
            const auto row = std::countr_zero(rows);
            maximum[row] = from.maximum[row];
            sum[row] = from.sum[row];
            unit[row] = from.unit[row];
            std::copy_n(from.values + row * value_stride, value_stride, values + row * value_stride);
        }
    }

private:
    /// Takes in the scores of rows that are less than a register, each lane of which is a row's of one of several keys: m lies in all.
    void push_together(T* scores, index_t keys, index_t rows) {
        const auto count = keys * rows, whole = count / lanes::size, rest = count % lanes::size;
        T* const last = scores + whole * lanes::size;
        const auto of_last = select(simd::lane_bits::first(rest), lanes::load(last), lanes(hidden));
        const auto earlier = lanes::load(maximum), top = max_or_second(of_last, raised(earlier, scores, whole, lanes::size));
        const auto m = simd::join_every(top, rows, [](lanes a, lanes b) { return max_or_second(a, b); });
        const auto shrink = simd::exp_nonpositive(earlier - m);
        m.store(maximum);
        shrink.store(factor);
        for (T* at = scores; at < last; at += lanes::size) simd::exp_nonpositive(lanes::load(at) - m).store(at);
        if (rest > 0) simd::exp_nonpositive(of_last - m).store(last);
        fma(lanes::load(sum), shrink, sum_of(scores, keys, rows)).store(sum);
    }
    /// The sums of weights[keys][rows], in the order of the keys.
    static lanes sum_of(const T* weights, index_t keys, index_t rows) {
        lanes result = T{0};
        simd::unroll<std::countr_zero(static_cast<unsigned>(lanes::size))>([&](auto power) {
            constexpr index_t count = index_t{1} << power();
            if (rows != count) return;
            T of_row[std::size_t{count}] = {};
#pragma GCC unroll 8
            for (index_t j = 0; j < keys; ++j)
                for (index_t row = 0; row < count; ++row) of_row[row] += weights[j * count + row];
            result = count == 1 ? lanes(of_row[0]) : lanes::load_first(of_row, count);
        });
        return result;
    }
    /// The larger of m and a column of scores. Four chains: one would wait for its own last step.
    static lanes raised(lanes m, const T* column, index_t keys, index_t stride) {
        lanes top[4] = {m, m, m, m};
        index_t j = 0;
        for (; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
            for (index_t i = 0; i < 4; ++i) top[i] = max_or_second(lanes::load(column + (j + i) * stride), top[i]);
        for (; j < keys; ++j) top[0] = max_or_second(lanes::load(column + j * stride), top[0]);
        return max_or_second(max_or_second(top[0], top[1]), max_or_second(top[2], top[3]));
    }
    /// Scores become weights. Their sum, in the order of the keys.
    template <class E>
    static lanes weigh(T* column, index_t keys, index_t stride, lanes m, const std::uint64_t* visible, index_t row) {
        const auto all = simd::lane_bits::first(lanes::size).value;
        lanes l = T{0};
        index_t j = 0;
        if constexpr (simd::terms_of<E> == 2) {
            E* to = reinterpret_cast<E*>(column); // not beyond what has been read
            for (; j < keys; j += 2, to += stride) {
                const T* const a = column + j * stride;
                const auto x = simd::exp_nonpositive(lanes::load(a) - m);
                const auto y = j + 1 < keys ? simd::exp_nonpositive(lanes::load(a + stride) - m) : lanes(T{0});
                const auto both = simd::operand_lanes<E>::of(x, y);
                both.store(to);
                l = l + both.first() + both.second();
            }
            return l;
        }
        for (; j + 2 <= keys; j += 2) {
            T *const a = column + j * stride, *const b = a + stride;
            if (visible && ((visible[j] | visible[j + 1]) >> row & all) == 0) {
                lanes(T{0}).store(a);
                lanes(T{0}).store(b);
                continue;
            }
            const auto x = simd::exp_nonpositive(lanes::load(a) - m), y = simd::exp_nonpositive(lanes::load(b) - m);
            x.store(a);
            y.store(b);
            l = l + x + y;
        }
        for (; j < keys; ++j) {
            T* const a = column + j * stride;
            const auto x = simd::exp_nonpositive(lanes::load(a) - m);
            x.store(a);
            l = l + x;
        }
        return l;
    }
};

/// m and l of every row (batch, heads, n), which the passes of a union hand on; with the rows of d_v channels, if the result would round
/// them.
template <Scalar T>
struct row_sums {
    T *maximum = nullptr, *sum = nullptr, *values = nullptr;
};

} // namespace attn::kernel
