// What will be read soon, asked for beside the multiply-adds of what is being computed.
#pragma once

#include "tile_loader.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The queue of products beside which nothing is asked for: all of it is left to the hardware.
struct no_prefetch {
    static void clear() {}
    static void add(const auto&, index_t, index_t) {}
    static void add_bytes(const std::byte*, index_t) {}
    static void spread(index_t) {}
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
    void clear() {
        first_ = end_ = lines_ = due_ = 0;
        pace_ = usual_pace;
    }
    template <class T>
    void add(const row_block<T>& rows, index_t count, index_t channels) {
        if (end_ == capacity || count <= 0 || channels <= 0 || rows.channel_stride != 1 || !rows.data) return;
        constexpr auto size = static_cast<index_t>(sizeof(T));
        const auto* const data = reinterpret_cast<const std::byte*>(rows.data);
        if (rows.row_stride == channels) add_bytes(data, count * channels * size);
        else add(block{data, rows.row_stride * size, count, channels * size});
    }
    void add_bytes(const std::byte* from, index_t count) {
        if (end_ < capacity) add(block{from, 0, 1, count});
    }
    template <class T>
    void add(const stored_rows<T>& rows, index_t count, index_t channels) {
        if (rows.is_narrow()) add(rows.template as<const std::uint16_t>(), count, channels);
        else add(rows.numbers(), count, channels);
    }
    /// Spreads what has been added over so many multiply-adds of registers, if they are more than it takes: a load that misses the cache
    /// beside few lines on their way waits for less.
    void spread(index_t multiply_adds) {
        if (lines_ > 0)
            pace_ = std::max(usual_pace, static_cast<int>(std::bit_width(static_cast<std::size_t>(multiply_adds / lines_))) - 1);
    }
    /// Asks for what so many multiply-adds of registers give time for. Inlined where sums are in registers, which a call would store and
    /// load.
    [[gnu::always_inline]] void beside(index_t multiply_adds) {
        if (first_ == end_) return;
        due_ += multiply_adds;
        auto lines = due_ >> pace_;
        due_ -= lines << pace_;
        while (lines > 0 && first_ < end_) lines -= fetch(queue_[first_], lines);
    }

private:
    static constexpr index_t line = 64, capacity = 8;
    /// A line for 16 multiply-adds, or 8 to 16 cycles: a window of 49 tokens of 32 channels has 11,000 for the 390 lines of the next.
    static constexpr int usual_pace = 4;
    struct block {
        const std::byte* row;
        index_t row_stride, rows, row_bytes;
        index_t at = 0;
    };

    void add(const block& rows) {
        queue_[end_++] = rows;
        lines_ += rows.rows * ((rows.row_bytes + line - 1) / line);
    }
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
    index_t lines_ = 0;     ///< that have been added
    index_t due_ = 0;       ///< multiply-adds for which no line has been asked for yet
    int pace_ = usual_pace; ///< a line for 2^pace multiply-adds
};
#endif

} // namespace attn::kernel
