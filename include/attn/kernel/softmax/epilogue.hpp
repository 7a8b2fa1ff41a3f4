// The epilogue: all that ends a span of keys for a query block, and with its last span a row of the result.
#pragma once

#include "../../core/inputs.hpp"
#include "../tile_loader.hpp"
#include "query_block.hpp"
#include "softmax_state.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What is known of each row of a query block over the spans and passes that have been: out holds its result so far, o / l.
template <Scalar T>
struct finished_rows {
    T maximum[64] = {}, sum[64] = {};

    /// No key has been seen; a sink per head is a key without a value, and is there from the start.
    void begin(const query_block& block, std::span<const double> sinks) {
        for (index row = 0; row < block.rows(); ++row) {
            const bool has_sink = !sinks.empty();
            const auto sink = has_sink ? static_cast<T>(sinks[static_cast<std::size_t>(block.head_of(row))]) : T{0};
            const bool counts = has_sink && sink != -std::numeric_limits<T>::infinity();
            maximum[row] = counts ? sink : std::numeric_limits<T>::lowest();
            sum[row] = counts ? T{1} : T{0};
        }
    }
};

/// Rows of the result of one query block.
template <Scalar T, class Arch>
class epilogue {
public:
    using lanes = simd::lanes<T, Arch>;

    epilogue(const query_block& block, const outputs<T>& out) : block_(block), out_(out) {}

    /// Rows that see no key at all, as bits.
    void clear_rows(std::uint64_t rows) const {
        for (; rows != 0; rows &= rows - 1) {
            T* const to = row_of(std::countr_zero(rows));
            for (index c = 0; c < channels(); ++c) to[c * channel_stride()] = T{0};
        }
    }
    /// o becomes o / l for the rows whose bit is set. Returns the bits of those that hold an infinity or a NaN which no score put there.
    /// unit: what the weights were multiplied with.
    static std::uint64_t finish(softmax_state<T, Arch>& state, std::uint64_t rows, T unit) {
        // All quotients at once: a division a row would take as long as the row.
        for (index row = 0; row < 64 - std::countl_zero(rows); row += lanes::size) {
            const auto l = lanes::load(state.sum + row);
            select(l == lanes(T{0}), lanes(T{0}), lanes(T{1}) / l).store(state.factor + row);
        }
        std::uint64_t odd = 0;
        for (auto left = rows; left != 0; left &= left - 1) {
            const auto row = std::countr_zero(left);
            const lanes inverse = state.factor[row];
            T* const values = state.values + row * state.value_stride;
            lanes zero = T{0};
            for (index c = 0; c < state.value_stride; c += lanes::size) {
                auto x = lanes::load(values + c) * inverse;
                if (unit != 1) x = x / lanes(unit);
                zero = fma(x, lanes(T{0}), zero);
                x.store(values + c);
            }
            const bool finite = (zero == lanes(T{0})).bits() == simd::lane_bits::first(lanes::size);
            if (!finite && state.sum[row] == state.sum[row]) odd |= std::uint64_t{1} << row;
        }
        return odd;
    }
    /// Joins the finished rows of a span, those whose bit is set, with what is known of them. fresh: rows of which nothing is.
    void merge(std::uint64_t rows, std::uint64_t fresh, const softmax_state<T, Arch>& span, finished_rows<T>& earlier) const {
        for (index first = 0; first < 64 - std::countl_zero(rows); first += lanes::size) {
            const auto own = rows >> first & simd::lane_bits::first(lanes::size).value;
            const auto m = lanes::load(earlier.maximum + first), l = lanes::load(earlier.sum + first);
            const softmax_merge<T, Arch> merged(m, l, lanes::load(span.maximum + first), lanes::load(span.sum + first));
            select(simd::lane_bits{own}, merged.maximum, m).store(earlier.maximum + first);
            select(simd::lane_bits{own}, merged.sum, l).store(earlier.sum + first);
            T a[lanes::size], b[lanes::size];
            merged.a.store(a);
            merged.b.store(b);
            for (auto left = own; left != 0; left &= left - 1) {
                const auto lane = std::countr_zero(left);
                const auto row = first + lane;
                const T* const values = span.values + row * span.value_stride;
                if (fresh >> row & 1)
                    write_row<false, T, Arch>(values, channels(), b[lane], T{0}, row_of(row), channel_stride());
                else if (span.sum[row] != 0)
                    write_row<true, T, Arch>(values, channels(), b[lane], a[lane], row_of(row), channel_stride());
            }
        }
    }
    void write_log_sum_exp(const finished_rows<T>& rows) const {
        if (!out_.log_sum_exp.data()) return;
        for (index row = 0; row < block_.rows(); ++row)
            out_.log_sum_exp(block_.batch, block_.head_of(row), block_.token_of(row), 0) =
                softmax_merge<T, Arch>::log_sum_exp(rows.maximum[row], rows.sum[row]);
    }

private:
    index channels() const { return out_.values.shape().channels; }
    index channel_stride() const { return out_.values.strides().channel; }
    T* row_of(index row) const { return out_.values.row(block_.batch, block_.head_of(row), block_.token_of(row)); }

    const query_block& block_;
    const outputs<T>& out_;
};

} // namespace attn::kernel
