// Rows of a gradient, while products are added to them.
#pragma once

#include "../../core/workspace.hpp"
#include "../tile_loader.hpp"

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

} // namespace attn::kernel
