// Brings what the next block of work reads closer, beside the arithmetic of this one.
#pragma once

#include "tile_loader.hpp"

#include <array>
#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Rows that will be read soon, asked for a few cache lines at a time beside other work, so that neither waits for the other.
template <class T>
class rows_ahead {
public:
    rows_ahead() = default;
    /// For the first-level cache, or, if they are read `later`, for the second.
    rows_ahead(const row_block<T>& rows, index count, index channels, bool later = false)
        : later_(later), row_(rows.data), row_stride_(rows.row_stride), channels_(channels),
          rows_(rows.channel_stride == 1 && channels > 0 ? count : 0) {
        if (rows_ > 1 && row_stride_ == channels_) { // one long row
            channels_ *= rows_;
            rows_ = 1;
        }
    }

    /// Whether it is one row, and whether it is read later.
    bool is_row() const { return rows_ == 1; }
    bool is_later() const { return later_; }
    const T* first() const { return row_ + at_; }
    index lines() const { return rows_ * ((channels_ + line - 1) / line); }
    /// Asks for so many lines more; how many of them were not there to ask for. A call between a micro-kernel's steps would make it put its
    /// registers aside.
    [[gnu::always_inline]] index fetch(index count) {
        while (count > 0 && rows_ > 0) {
            const auto own = std::min(count, (channels_ - at_ + line - 1) / line);
            const T *x = row_ + at_, *const end = x + own * line;
            if (later_)
                for (; x != end; x += line) simd::prefetch_second_level(x);
            else
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
    bool later_ = false;
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

/// What a panel of attention and the one after it will read and write, brought closer beside the panel's micro-kernels. Asked for all at
/// once it would fill the queue of outstanding misses, and the kernel would wait for it after all: spread, it took 7 % off heads of 512
/// tokens that lie in the third-level cache, 15 % off heads of 197. What another head of one panel
/// begins with goes to the second-level cache: windows of 49 tokens took 7 to 11 % less time from memory, but heads of 197 tokens, which
/// are more panels, 2 % more. And of what is one row, as the tokens of a head are, a micro-kernel asks for a line with each term, as its
/// multiply-adds leave room for loads: asked for between micro-kernels, heads of 128 tokens took 10 to 18 % longer, of 512 2 to 5 %, windows
/// 9 % in the third-level cache and 7 to 20 % from memory.
template <Scalar T>
class panel_ahead {
public:
    /// What there is no room for is not asked for.
    void add(const rows_ahead<const T>& rows) {
        if (rows.lines() <= 0 || count_ == rows_.size()) return;
        lines_ += rows.lines();
        rows_[count_++] = rows;
    }
    /// So many lines a step that all that are left are under way after `steps` steps, but never a burst.
    void spread(index steps) { pace_ = std::clamp<index>(lines_ / std::max<index>(1, steps) + 1, 4, 32); }
    /// Before a micro-kernel.
    void step() {
        if (row_left_ < few && (row_left_ > 0 || next_ < count_)) fetch();
    }
    /// tile.multiply_add(a, a_row, a_depth, b, b_depth, depth), with a line for each term until the micro-kernel's end, and so with some
    /// beyond a row's: a second loop without them, or a test in this one, cost what the lines beside it had brought. Two calls: with one,
    /// which is given the way to ask, gcc's heads of 197 tokens took a quarter longer.
    [[gnu::always_inline]] void multiply_add(auto& tile, const T* a, auto a_row, auto a_depth, const T* b, index b_depth, index depth) {
        if (row_left_ == 0) return tile.multiply_add(a, a_row, a_depth, b, b_depth, depth);
        const T* at = row_;
        if (row_is_later_)
            tile.multiply_add(a, a_row, a_depth, b, b_depth, depth, std::identity{}, [&] {
                simd::prefetch_second_level(at);
                at += line;
            });
        else
            tile.multiply_add(a, a_row, a_depth, b, b_depth, depth, std::identity{}, [&] {
                simd::prefetch(at);
                at += line;
            });
        row_ = at;
        row_left_ -= std::min(row_left_, depth);
    }

private:
    [[gnu::noinline]] void fetch() {
        for (; row_left_ > 0; --row_left_, row_ += line) simd::prefetch_second_level(row_);
        if (next_ < count_ && rows_[next_].is_row()) {
            row_is_later_ = rows_[next_].is_later();
            row_ = rows_[next_].first();
            row_left_ = rows_[next_++].lines();
            lines_ -= row_left_;
            return;
        }
        for (index lines = pace_; next_ < count_;) {
            const auto left = rows_[next_].fetch(lines);
            lines_ -= lines - left;
            lines = left;
            if (lines == 0) return;
            ++next_;
        }
    }

    std::array<rows_ahead<const T>, 6> rows_;
    std::size_t count_ = 0, next_ = 0;
    index lines_ = 0, pace_ = 0;
    static constexpr index line = 64 / sizeof(T), few = 8; ///< so few lines are not worth a micro-kernel
    const T* row_ = nullptr;                               ///< which micro-kernels ask for
    index row_left_ = 0;                                   ///< lines
    bool row_is_later_ = false;
};

} // namespace attn::kernel
