// Rows of a gradient, and the products that are added to them, which leave out what is hidden.
#pragma once

#include "../../core/workspace.hpp"
#include "../gemm/matrix_tile.hpp"
#include "../prefetch.hpp"

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

/// `rows` rows of a product that adds to C, of so many channels in whole registers. seen: null if numbers are finite; else one bit per
/// query for each key, and hidden pairs, 0 in A, are not touched: beside NaN 0 would be NaN. The bits are the same. by_query: rows are
/// queries and the depth is keys, or the other way round.
template <Scalar T>
void add_products(tile_product<T> product, index_t rows, index_t channels, const std::uint64_t* seen, bool by_query) {
    using lanes = simd::lanes<T>;
    if (seen) {
        for (index_t i = 0; i < rows; ++i)
            for (index_t c = 0; c < channels; c += lanes::size) {
                T* const at = product.c.address(i, c);
                auto sum = lanes::load(at);
                for (index_t d = 0; d < product.depth; ++d)
                    if (by_query ? seen[d] >> i & 1 : seen[i] >> d & 1)
                        sum = fma(lanes(product.a(i, d)), lanes::load(product.b.address(d, c)), sum);
                sum.store(at);
            }
        return;
    }
    multiply_wide<T>(rows, channels / lanes::size, product, no_prefetch());
}

} // namespace attn::kernel
