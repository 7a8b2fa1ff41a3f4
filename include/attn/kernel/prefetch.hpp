// What will be read soon, asked for beside the multiply-adds of what is being computed.
#pragma once

#include "tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The queue of products beside which nothing is asked for: all of it is left to the hardware.
struct no_prefetch {
    static void clear() {}
    static void add(const auto&, index_t, index_t) {}
    static void add_bytes(const std::byte*, index_t) {}
    static void beside(index_t) {}
};

#if defined(ATTN_NO_PREFETCH)
using prefetch_next = no_prefetch;
#else
/// A queue of rows that come next, asked for a few cache lines at a time, in address order: asked for at once they would fill the buffers
/// of the lines that are on their way, and the next load would wait for all of them. They go to the second-level cache: a key block is
/// larger than the first. What fits no more, or does not lie in lines, is left to the hardware.
class prefetch_next {
public:
    void clear() { first_ = end_ = 0; }
    template <class T>
    void add(const row_block<T>& rows, index_t count, index_t channels) {
        if (end_ == capacity || count <= 0 || channels <= 0 || rows.channel_stride != 1 || !rows.data) return;
        constexpr auto size = static_cast<index_t>(sizeof(T));
        queue_[end_++] = rows.row_stride == channels
                             ? block{reinterpret_cast<const std::byte*>(rows.data), 0, 1, count * channels * size}
                             : block{reinterpret_cast<const std::byte*>(rows.data), rows.row_stride * size, count, channels * size};
    }
    void add_bytes(const std::byte* from, index_t count) {
        if (end_ < capacity) queue_[end_++] = {from, 0, 1, count};
    }
    template <class T>
    void add(const stored_rows<T>& rows, index_t count, index_t channels) {
        if (rows.is_narrow()) add(rows.template as<const std::uint16_t>(), count, channels);
        else add(rows.numbers(), count, channels);
    }
    /// Asks for what so many multiply-adds of registers give time for: a line for 16, or 8 to 16 cycles. A window of 49 tokens of
    /// 32 channels has 11,000 for the 390 lines of the next. Inlined where sums are in registers, which a call would store and load.
    [[gnu::always_inline]] void beside(index_t multiply_adds) {
        for (auto lines = multiply_adds / 16; lines > 0 && first_ < end_;) lines -= fetch(queue_[first_], lines);
    }

private:
    static constexpr index_t line = 64, capacity = 8;
    struct block {
        const std::byte* row;
        index_t row_stride, rows, row_bytes;
        index_t at = 0;
    };

    [[gnu::always_inline]] index_t fetch(block& from, index_t limit) {
        const auto count = std::min(limit, (from.row_bytes - from.at + line - 1) / line);
        const auto* const at = from.row + from.at;
        for (index_t i = 0; i < count; ++i) simd::prefetch_far(at + i * line);
        from.at += count * line;
        if (from.at >= from.row_bytes) {
            from.at = 0;
            from.row += from.row_stride;
            if (--from.rows == 0) ++first_;
        }
        return count;
    }

    block queue_[capacity];
    index_t first_ = 0, end_ = 0;
};
#endif

} // namespace attn::kernel
