// Brings what the next block of work reads closer, beside the arithmetic of this one.
#pragma once

#include "tile_loader.hpp"

#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Rows that will be read soon, asked for a few cache lines at a time beside other work, so that neither waits for the other.
template <class T>
class rows_ahead {
public:
    rows_ahead() = default;
    rows_ahead(const row_block<T>& rows, index count, index channels)
        : row_(rows.data), row_stride_(rows.row_stride), channels_(channels),
          rows_(rows.channel_stride == 1 && channels > 0 ? count : 0) {
        if (rows_ > 1 && row_stride_ == channels_) { // one long row
            channels_ *= rows_;
            rows_ = 1;
        }
    }

    index lines() const { return rows_ * ((channels_ + line - 1) / line); }
    /// Asks for so many lines more; how many of them were not there to ask for. A call between a micro-kernel's steps would make it put its
    /// registers aside.
    [[gnu::always_inline]] index fetch(index count) {
        while (count > 0 && rows_ > 0) {
            const auto own = std::min(count, (channels_ - at_ + line - 1) / line);
            const T *x = row_ + at_, *const end = x + own * line;
            for (; x != end; x += line) simd::prefetch(x);
            count -= own;
            at_ += own * line;
            if (at_ < channels_) break;
            at_ = 0;
            row_ += row_stride_;
            --rows_;
        }
        return count;
    }

private:
    static constexpr index line = 64 / sizeof(T);
    const T* row_ = nullptr;
    index row_stride_ = 0, channels_ = 0, rows_ = 0, at_ = 0;
};

/// What the next block of work will read and write, brought closer beside this one.
template <Scalar T>
struct work_ahead {
    rows_ahead<const T> first, second;
    index lines_each = 0;

    /// Spreads them over so many multiply-adds of registers.
    void spread(index multiply_adds) {
        constexpr index between = 24 * 16; // of a tile between two calls of fetch
        lines_each = (std::max(first.lines(), second.lines()) * between + multiply_adds) / std::max<index>(1, multiply_adds);
    }
    [[gnu::always_inline]] void fetch() {
        first.fetch(lines_each);
        second.fetch(lines_each);
    }
};

} // namespace attn::kernel
