// The epilogue: all that ends a span of keys for a query block, and with its last span a row of the result.
#pragma once

#include "../../core/inputs.hpp"
#include "../tile_loader.hpp"
#include "query_block.hpp"
#include "softmax_state.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Writes to = share * to + factor * sums / unit, as write_row does. What unit kept from overflowing is multiplied before it is divided;
/// the rest has the bits that it has with a unit of 1.
template <bool added, Scalar T>
void write_sums(const T* sums, T unit, index_t channels, T factor, T share, T* to, index_t channel_stride) {
    if (unit == 1) return write_row<added, T>(sums, channels, factor, share, to, channel_stride);
    for (index_t c = 0; c < channels; ++c) {
        const auto sum = sums[c] / unit;
        const bool fits = std::isfinite(sum);
        write_row<added, T>(fits ? &sum : sums + c, 1, fits ? factor : factor / unit, share, to + c * channel_stride, 1);
    }
}

/// Rows of the result of one query block: out holds o / l over the spans and passes that have been, and m and l stand here. A result of
/// 16-bit numbers is rounded to at the end: until then its rows, of d_v channels, lie in `wide`, or with those that are kept.
template <Scalar T, class Stored = any_storage, class State = softmax_state<T>>
class epilogue {
public:
    using lanes = simd::lanes<T>;

    /// The rows of a block. begins: no key of them has been seen; a sink per head is a key without a value, and is there from the start.
    /// Else they have been kept, with their maxima and sums.
    epilogue(const query_block& block, const outputs<T>& out, T* wide, const row_sums<T>& known, std::span<const double> sinks, bool begins)
        : block_(block), out_(out), channel_stride_(out.values.is_narrow() ? 1 : out.values.strides().channels),
          written_(begins ? 0 : bit_range(0, block.rows())) {
        std::fill_n(maximum_, max_block_rows, softmax_state<T>::nothing);
        std::fill_n(sum_, max_block_rows, T{0});
        for (index_t row = 0; row < block.rows(); ++row) {
            const auto number = number_of(row), head = block.head_of(row);
            const auto [maximum, sum] = begins ? softmax_state<T>::at_start(sinks, head)
                                               : typename softmax_state<T>::sums{known.maximum[number], known.sum[number]};
            maximum_[row] = maximum;
            sum_[row] = sum;
            rows_[row] = !out.values.is_narrow() ? out.values.rows(block.batch, head, block.token_of(row)).numbers().data
                         : known.values          ? known.values + number * channels()
                                                 : wide + row * channels();
        }
    }

    /// The rows, as bits, whose sums hold an infinity or a NaN that no score put there.
    static std::uint64_t non_finite_rows(const softmax_state<T>& span, std::uint64_t rows) {
        const auto finite = [&](index_t row, index_t count) {
            return are_finite<T>({span.values + row * span.value_stride, 0, 1}, 1, count * span.value_stride);
        };
        const auto end = bit_end(rows);
        if (rows == bit_range(0, end) && finite(0, end)) return 0;
        std::uint64_t odd = 0;
        for (auto left = rows; left != 0; left &= left - 1) {
            const auto row = std::countr_zero(left);
            if (span.sum[row] == span.sum[row] && !finite(row, 1)) odd |= std::uint64_t{1} << row;
        }
        return odd;
    }
    /// Joins the rows of a span whose bit is set with what is known of them: out becomes share_of_out out + share_of_span o / l.
    void merge(const softmax_state<T>& span, std::uint64_t rows) {
        for (index_t first = 0; first < bit_end(rows); first += lanes::size) {
            const auto own = rows >> first & simd::lane_bits::first(lanes::size).value;
            const auto m = lanes::load(maximum_ + first), l = lanes::load(sum_ + first), span_sum = lanes::load(span.sum + first);
            const typename State::merge merged(m, l, lanes::load(span.maximum + first), span_sum);
            select(simd::lane_bits{own}, merged.maximum, m).store(maximum_ + first);
            select(simd::lane_bits{own}, merged.sum, l).store(sum_ + first);
            T of_out[lanes::size], of_span[lanes::size];
            merged.a.store(of_out);
            select(span_sum == lanes(T{0}), lanes(T{0}), merged.b / span_sum).store(of_span);
            for (auto left = own; left != 0; left &= left - 1) {
                const auto lane = std::countr_zero(left);
                const auto row = first + lane;
                const T* const values = span.values + row * span.value_stride;
                if (!(written_ >> row & 1))
                    write_sums<false, T>(values, span.unit[row], channels(), of_span[lane], T{0}, rows_[row], channel_stride_);
                else if (span.sum[row] != 0)
                    write_sums<true, T>(values, span.unit[row], channels(), of_span[lane], of_out[lane], rows_[row], channel_stride_);
            }
        }
        written_ |= rows;
    }
    /// Completes the rows after the last span.
    void finish() const {
        write_unseen();
        const auto& to = Stored::view(out_.values);
        for (index_t row = 0; to.is_narrow() && row < block_.rows(); ++row)
            store_row<T>(rows_[row], channels(), to.rows(block_.batch, block_.head_of(row), block_.token_of(row)));
        if (!out_.log_sum_exp.data()) return;
        for (index_t row = 0; row < block_.rows(); ++row)
            out_.log_sum_exp(block_.batch, block_.head_of(row), block_.token_of(row), 0) =
                softmax_merge<T>::log_sum_exp(maximum_[row], sum_[row]);
    }
    /// Keeps the rows, with their maxima and sums, for keys that come later.
    void keep(const row_sums<T>& known) const {
        write_unseen();
        for (index_t row = 0; row < block_.rows(); ++row) {
            known.maximum[number_of(row)] = maximum_[row];
            known.sum[number_of(row)] = sum_[row];
        }
    }

private:
    /// Rows that have seen no key at all are 0.
    void write_unseen() const {
        for (auto rows = ~written_ & bit_range(0, block_.rows()); rows != 0; rows &= rows - 1) {
            T* const to = rows_[std::countr_zero(rows)];
            for (index_t c = 0; c < channels(); ++c) to[c * channel_stride_] = T{0};
        }
    }
    index_t channels() const { return out_.values.shape().channels; }
    index_t number_of(index_t row) const {
        const auto& s = out_.values.shape();
        return (block_.batch * s.heads + block_.head_of(row)) * s.tokens + block_.token_of(row);
    }

    query_block block_;
    const outputs<T>& out_;
    index_t channel_stride_;
    std::uint64_t written_;                           ///< rows of out
    T* rows_[max_block_rows];                         ///< of out
    T maximum_[max_block_rows], sum_[max_block_rows]; ///< m and l
};

} // namespace attn::kernel
