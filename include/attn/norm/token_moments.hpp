// Mean and variance of each channel over many tokens.
#pragma once

#include "../kernel/tile_loader.hpp"
#include "../simd/lanes.hpp"
#include "../simd/unfused.hpp"
#include "../simd/unroll.hpp"
#include "norm.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Which tokens count in training: (batch, heads or 1, tokens, 1), true = counts. Without data, all do.
using token_mask = tensor_view<const bool>;

/// Count of tokens, and for each channel their mean and the sum of their squared deviations from it, in double: tokens can be added for
/// ever without losing digits, and two such sets merge exactly.
/// Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
struct moments_view {
    double* mean;
    double* squares;
    index_t count = 0;

    /// Adds `more` tokens of one channel. The caller adds to `count` once all channels are done.
    void merge(index_t channel, index_t more, double their_mean, double their_squares) {
        const auto a = static_cast<double>(count), b = static_cast<double>(more);
        const auto apart = their_mean - mean[channel];
        mean[channel] += simd::unfused(apart * (b / (a + b)));
        squares[channel] += their_squares + simd::unfused(apart * apart * (a * b / (a + b)));
    }
    /// Adds the tokens of another set.
    void merge(const moments_view& other, index_t channels) {
        if (other.count == 0) return;
        for (index_t c = 0; c < channels; ++c) merge(c, other.count, other.mean[c], other.squares[c]);
        count += other.count;
    }
    /// Forgets all tokens.
    void clear(index_t channels) {
        std::fill_n(mean, channels, 0.0);
        std::fill_n(squares, channels, 0.0);
        count = 0;
    }
    /// The variance of a channel over the tokens themselves; `unbiased`: of what they are a sample of. NaN for no token, and unbiased for
    /// one.
    double variance(index_t channel, bool unbiased) const { return squares[channel] / static_cast<double>(count - (unbiased ? 1 : 0)); }
};

namespace detail {

inline void check_mask(std::string_view operation, const token_mask& mask, const shape& x) {
    if (!mask.data()) return;
    check_view(operation, "mask", mask);
    const auto& s = mask.shape();
    if (s.batch != x.batch || (s.heads != 1 && s.heads != x.heads) || s.tokens != x.tokens || s.channels != 1)
        detail::raise(shape_error(operation, "mask", "has shape ", s, ", but x has ", x, ": it must be (batch, heads or 1, tokens, 1)"));
}

inline bool counts(const token_mask& mask, index_t b, index_t h, index_t i) {
    return !mask.data() || mask(b, mask.shape().heads == 1 ? 0 : h, i, 0);
}

inline index_t counted_tokens(const token_mask& mask, const shape& x) {
    if (!mask.data()) return x.batch * x.heads * x.tokens;
    index_t count = 0;
    for_each_row(x, [&](index_t b, index_t h, index_t i) { count += counts(mask, b, h, i); });
    return count;
}
/// Throws shape_error if too few tokens count.
inline void check_tokens_for_variance(std::string_view operation, const token_mask& mask, const shape& x) {
    if (const auto tokens = counted_tokens(mask, x); tokens < 2)
        detail::raise(
            shape_error(operation, "x", "of shape ", x, " has ", tokens, " tokens that count, but training needs two for a variance"));
}

/// Adds a few rows to moments. In lanes, the sums of x - shift and of its squares, where shift is x of the first row; should that lie far
/// from the others, whose differences then all but cancel, the mean that these sums tell. Then, in double, the merge.
template <Scalar T>
class row_group {
public:
    static constexpr int max_rows = 32;
    static constexpr index_t scratch_rows = 3;

    /// scratch: scratch_rows times `padded` numbers, the channels in whole registers.
    row_group(T* scratch, index_t padded) : shift_(scratch), total_(scratch + padded), squares_(scratch + 2 * padded) {}

    void push(const T* row, index_t channels, moments_view& into) {
        rows_[static_cast<std::size_t>(count_++)] = row;
        if (count_ == max_rows) flush(channels, into);
    }
    /// How many rows wait for others.
    index_t waiting() const { return count_; }
    const T* waiting_row(index_t number) const { return rows_[static_cast<std::size_t>(number)]; }
    void flush(index_t channels, moments_view& into) {
        if (count_ == 0) return;
        constexpr int size = lanes::size;
        index_t c = 0;
        for (; c + 4 * size <= channels; c += 4 * size) sum<4>(c, [](const T* p) { return lanes::load(p); });
        for (; c + size <= channels; c += size) sum<1>(c, [](const T* p) { return lanes::load(p); });
        if (c < channels) sum<1>(c, [left = channels - c](const T* p) { return lanes::load_first(p, left); });
        const auto n = static_cast<double>(count_);
        for (c = 0; c < channels; ++c) {
            if (!std::isfinite(squares_[c])) {
                one_by_one(c, into); // squares that overflow, or x that is not finite
                continue;
            }
            const auto from_shift = static_cast<double>(total_[c]) / n;
            const auto deviation =
                std::max(0.0, static_cast<double>(squares_[c]) - simd::unfused(static_cast<double>(total_[c]) * from_shift));
            into.merge(c, count_, static_cast<double>(shift_[c]) + from_shift, deviation);
        }
        into.count += count_;
        count_ = 0;
    }

private:
    using lanes = simd::lanes<T>;

    /// Sums so many registers of channels from c on.
    template <int registers, class Load>
    [[gnu::always_inline]] void sum(index_t c, const Load& load) {
        constexpr int size = lanes::size;
        lanes shift[static_cast<std::size_t>(registers)], total[static_cast<std::size_t>(registers)],
            squares[static_cast<std::size_t>(registers)];
        simd::unroll<registers>([&](auto k) { shift[k] = load(rows_[0] + c + k * size); });
        add<registers>(c, 1, load, shift, total, squares);
        const lanes part = T{1} / static_cast<T>(count_), much = T{8};
        simd::unroll<registers>([&](auto k) {
            const auto from_shift = total[k] * part, lost = total[k] * from_shift;
            const auto is_far = lost > much * (squares[k] - lost);
            if (is_far.bits() != simd::lane_bits{}) [[unlikely]] {
                shift[k] = select(is_far, shift[k] + from_shift, shift[k]); // the other lanes come to the same sums again
                add<1>(c + k * size, 0, load, shift + k, total + k, squares + k);
            }
            shift[k].store(shift_ + c + k * size);
            total[k].store(total_ + c + k * size);
            squares[k].store(squares_ + c + k * size);
        });
    }
    /// The sums of x - shift and of its squares over the rows from `first` on, of so many registers.
    template <int registers, class Load>
    [[gnu::always_inline]] void add(index_t c, index_t first, const Load& load, const lanes* shift, lanes* total, lanes* squares) const {
        constexpr int size = lanes::size;
        simd::unroll<registers>([&](auto k) { total[k] = squares[k] = lanes(0); });
        for (index_t r = first; r < count_; ++r) {
            const T* const row = rows_[static_cast<std::size_t>(r)] + c;
            simd::unroll<registers>([&](auto k) {
                const auto d = load(row + k * size) - shift[k];
                total[k] += d;
                squares[k] = fma(d, d, squares[k]);
            });
        }
    }
    void one_by_one(index_t c, const moments_view& into) const {
        moments_view one{into.mean + c, into.squares + c, into.count};
        for (index_t r = 0; r < count_; ++r, ++one.count) one.merge(0, 1, static_cast<double>(rows_[static_cast<std::size_t>(r)][c]), 0);
    }

    T *shift_, *total_, *squares_;
    std::array<const T*, max_rows> rows_{};
    index_t count_ = 0;
};

/// The pieces that so many rows are taken in, numbered over batch, heads and tokens.
struct row_pieces {
    static constexpr index_t max_pieces = 64;
    index_t rows, count;

    explicit row_pieces(index_t all_rows) : rows(all_rows), count(std::clamp<index_t>(all_rows / 256, 1, max_pieces)) {}
    /// The first row of a piece; of the one after the last, their number.
    index_t first(index_t piece) const { return rows / count * piece + std::min(piece, rows % count); }
};

/// Moments of the rows that count, over batch, heads and tokens. The rows go in pieces that depend on the shape only, which are merged in
/// order: the result is the same for any number of threads and any strides.
template <Scalar T>
class token_statistics {
public:
    /// narrow: of rows that are stored in 16 bits.
    static token_statistics in(scratch& memory, const shape& x, index_t concurrency, bool narrow = false) {
        token_statistics s;
        s.pieces_ = row_pieces(x.batch * x.heads * x.tokens).count;
        s.moments_ = memory.take<double>(2, s.pieces_, x.channels);
        s.counts_ = memory.take<index_t>(s.pieces_);
        s.sums_ = memory.take<T>(concurrency, row_group<T>::scratch_rows, padded(x.channels));
        if (narrow) s.wide_ = memory.take<T>(concurrency, group_rows, padded(x.channels));
        return s;
    }
    /// The moments of the tokens that count; they lie in the workspace.
    moments_view operator()(const stored_view<const T>& x, const token_mask& mask, const execution& run) const {
        const auto& s = x.shape();
        const row_pieces pieces(s.batch * s.heads * s.tokens);
        run.for_each(pieces_, [&](index_t piece, index_t slice) {
            auto moments = of_piece(piece, s.channels);
            moments.clear(s.channels);
            row_group<T> group(sums_ + slice * row_group<T>::scratch_rows * padded(s.channels), padded(s.channels));
            for (index_t r = pieces.first(piece); r < pieces.first(piece + 1); ++r) {
                const auto [b, h, i] = row_place(s, r);
                if (!counts(mask, b, h, i)) continue;
                const auto row = x.rows(b, h, i);
                if (!x.is_narrow()) {
                    group.push(row.numbers().data, s.channels, moments);
                    continue;
                }
                T* const wide = wide_ + (slice * group_rows + group.waiting()) * padded(s.channels);
                kernel::copy_rows<T>(row, 1, s.channels, wide, padded(s.channels));
                group.push(wide, s.channels, moments);
            }
            group.flush(s.channels, moments);
            counts_[piece] = moments.count;
        });
        auto all = of_piece(0, s.channels);
        all.count = counts_[0];
        for (index_t piece = 1; piece < pieces_; ++piece) {
            auto more = of_piece(piece, s.channels);
            more.count = counts_[piece];
            all.merge(more, s.channels);
        }
        return all;
    }

private:
    static constexpr index_t group_rows = row_group<T>::max_rows; ///< that are taken in together

    static index_t padded(index_t channels) {
        constexpr index_t numbers = alignment / sizeof(T);
        return (channels + numbers - 1) / numbers * numbers;
    }
    moments_view of_piece(index_t piece, index_t channels) const {
        double* const mean = moments_ + 2 * piece * channels;
        return {mean, mean + channels, 0};
    }

    index_t pieces_ = 1;
    double* moments_ = nullptr;
    index_t* counts_ = nullptr;
    T* sums_ = nullptr;
    T* wide_ = nullptr; ///< rows that are stored in 16 bits, until they are taken in
};

} // namespace detail

} // namespace attn
