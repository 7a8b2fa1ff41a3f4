// Rows of a gradient, and the products that are added to them, which leave out what is hidden.
#pragma once

#include "../../core/workspace.hpp"
#include "../attend/seen_runs.hpp"
#include "../gemm/matrix_tile.hpp"
#include "../prefetch.hpp"

#include <functional>
#include <numeric>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Some rows of a result as the micro-kernel adds to them: in place if they are whole registers, else in a copy that is brought back. So a
/// gradient's sums need no memory of their own.
template <Scalar T>
class summed_rows {
public:
    summed_rows(detail::scratch& memory, index_t max_rows, index_t channels)
        : stride_(whole_registers<T>(channels)), copy_(memory.take<T>(max_rows, stride_)) {}

    /// Begins with the rows first, first + step, ...
    void begin(const tensor_view<T>& to, index_t batch, index_t head, index_t first, index_t step, index_t count) {
        rows_ = to.rows(batch, head, first).every(step);
        count_ = count;
        channels_ = to.shape().channels;
        in_place_ = rows_.channel_stride == 1 && channels_ == stride_;
        is_copied_ = false;
    }
    /// The rows that were begun with, from number r on, in whole registers.
    row_block<T> from(index_t r) {
        if (in_place_) return rows_.from(r);
        if (!is_copied_) copy_rows<T>(rows_, count_, channels_, copy_, stride_);
        is_copied_ = true;
        return {copy_ + r * stride_, stride_, 1};
    }
    index_t width() const { return stride_; }
    /// Writes back what was added to copies.
    void end() const {
        for (index_t r = 0; is_copied_ && r < count_; ++r)
            write_row<false, T>(copy_ + r * stride_, channels_, T{1}, T{0}, rows_.data + r * rows_.row_stride, rows_.channel_stride);
    }

    /// Makes zeros of rows, before all is added. Nothing without memory.
    static void clear(const tensor_view<T>& to, index_t batch, index_t head, const row_range& rows) {
        detail::fill_zero(to.slice({.batch = {batch, 1}, .heads = {head, 1}, .tokens = rows}));
    }
    /// Multiplies rows by a factor, after all has been added. Nothing without memory.
    void scale(const tensor_view<T>& to, index_t batch, index_t head, const row_range& rows, T factor) {
        if (!to.data()) return;
        for (auto r = rows.first; r < rows.end(); ++r) {
            begin(to, batch, head, r, 1, 1);
            write_row<false, T>(from(0).data, channels_, factor, T{0}, rows_.data, rows_.channel_stride);
        }
    }

private:
    index_t stride_;
    T* copy_;
    row_block<T> rows_ = {};
    index_t count_ = 0, channels_ = 0;
    bool in_place_ = false, is_copied_ = false;
};

/// What is seen of a product whose rows are queries and whose depth is keys, or the other way round.
struct seen_pairs {
    const std::uint64_t* visible = nullptr; ///< [keys] one bit for each query; null if all are seen
    bool one_by_one = false;                ///< hidden pairs, 0 in A, are not touched: beside NaN 0 would be NaN

    /// Of at most 64 from `first` on in a product's depth, those of which one of its rows is seen.
    std::uint64_t seen(bool by_query, index_t row, index_t rows, index_t first, index_t count) const {
        if (by_query) return keys_seen(visible + first, count, bit_range(row, rows));
        return std::accumulate(visible + row, visible + row + rows, std::uint64_t{0}, std::bit_or());
    }
};

/// Whether products of so many keys and rows take less time if tiles leave out what none of their rows sees: a quarter of it or more, by
/// tiles of rows.
template <Scalar T>
bool are_sparse(const std::uint64_t* visible, index_t keys, index_t rows) {
    index_t seen = 0;
    for_each_row_tile<T>(rows, tile_traits<T>::max_columns, [&](index_t row, index_t count) {
        for_each_seen_run(
            keys, [&](index_t first, index_t size) { return keys_seen(visible + first, size, bit_range(row, count)); },
            [&](index_t first, index_t end) { seen += (end - first) * count; });
    });
    return 4 * seen <= 3 * keys * rows;
}

/// `rows` rows of a product that adds to C, of so many channels in whole registers. A, [keys][queries], is read as it lies or transposed.
/// What is hidden, 0 in A, is left out where all rows of a tile share it; the bits are the same.
template <Scalar T>
void add_products(const tile_product<T>& product, index_t rows, index_t channels, const seen_pairs& pairs) {
    using lanes = simd::lanes<T>;
    const bool by_query = product.a.row_stride == 1;
    if (!pairs.visible) return multiply_wide<T>(rows, channels / lanes::size, product, no_prefetch());
    if (pairs.one_by_one) {
        for (index_t i = 0; i < rows; ++i)
            for (index_t c = 0; c < channels; c += lanes::size) {
                T* const at = product.c.address(i, c);
                auto sum = lanes::load(at);
                for (index_t d = 0; d < product.depth; ++d)
                    if (by_query ? pairs.visible[d] >> i & 1 : pairs.visible[i] >> d & 1)
                        sum = fma(lanes(product.a(i, d)), lanes::load(product.b.address(d, c)), sum);
                sum.store(at);
            }
        return;
    }
    for_each_row_tile<T>(rows, channels / lanes::size, [&](index_t row, index_t count) {
        const auto seen = [&](index_t first, index_t size) { return pairs.seen(by_query, row, count, first, size); };
        for_each_seen_run(product.depth, seen, [&](index_t first, index_t end) {
            const tile_product<T> run{
                .a = product.a.from(row, first), .b = product.b.from(first), .depth = end - first, .c = product.c.from(row), .adds = true};
            multiply_wide<T>(count, channels / lanes::size, run, no_prefetch());
        });
    });
}

} // namespace attn::kernel
