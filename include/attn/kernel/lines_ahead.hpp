// Brings the next block of linear attention closer, a cache line at a time beside the terms of the micro-kernel.
#pragma once

#include "../core/inputs.hpp"
#include "tile_loader.hpp"
#include "token_chunks.hpp"

#include <utility>

namespace attn::kernel {

/// The cache lines of some rows, one after the other.
template <Scalar T>
class row_lines {
public:
    row_lines() = default;
    row_lines(const row_block<const T>& rows, index count, index channels) {
        if (rows.channel_stride != 1 || count <= 0 || channels <= 0) return;
        if (rows.row_stride == channels) channels *= std::exchange(count, 1); // one long row
        next_ = rows.data;
        end_ = next_ + channels;
        row_stride_ = rows.row_stride;
        gap_ = row_stride_ - channels;
        more_rows_ = count - 1;
        count_ = count * ((channels + line - 1) / line);
    }
    index count() const { return count_; }
    /// Asks for one more; false if there is none.
    [[gnu::always_inline]] bool fetch() {
        if (next_ == end_) return false;
        simd::prefetch(next_);
        next_ += line;
        if (next_ < end_) return true;
        next_ = end_;
        if (more_rows_ == 0) return true;
        --more_rows_;
        next_ += gap_;
        end_ += row_stride_;
        return true;
    }

private:
    static constexpr index line = 64 / sizeof(T);
    // In this order gcc does not pair next_ and end_ in a register: a load of both would wait for the stores of each, 15 % of d = 32.
    const T* next_ = nullptr;
    index more_rows_ = 0;
    const T* end_ = nullptr;
    index gap_ = 0, count_ = 0, row_stride_ = 0;
};

/// What the next block of linear attention will read and write: a line of the first and one of the second after every so many terms of a
/// tile, and when there are no more of the first, of the third. Two streams at a time were faster than all in one by 3 to 5 %, and than
/// several lines at a time: those take so many integer registers that gcc, where the strides of a tile take some too, keeps its pointers
/// in vector registers, and they wait behind the multiply-adds.
template <Scalar T>
class lines_ahead {
public:
    lines_ahead() = default;
    lines_ahead(const row_lines<T>& first, const row_lines<T>& second, const row_lines<T>& third = {})
        : first_(first), second_(second), third_(third) {}

    /// Spreads them over so many terms of tiles.
    void spread(index terms) { every_ = terms / std::max<index>(1, std::max(first_.count() + third_.count(), second_.count())); }
    /// Terms between two calls of fetch.
    index every() const { return std::max<index>(1, every_); }
    [[gnu::always_inline]] void fetch() {
        if (!first_.fetch() && third_.count() > 0) first_ = std::exchange(third_, {});
        second_.fetch();
    }

private:
    row_lines<T> first_, second_, third_;
    index every_ = 1;
};

/// The keys [first, first + count) and their values.
template <Scalar T>
lines_ahead<T> keys_ahead(const inputs<T>& in, index batch, index kv_head, index first, index count) {
    return {{rows_of(in.keys, batch, kv_head, first), count, in.keys.shape().channels},
            {rows_of(in.values, batch, kv_head, first), count, in.values.shape().channels}};
}

/// What follows a chunk of queries: the next chunk, with where its results go and, if not null, its rows of `local`; or the keys of another
/// head.
template <Scalar T>
lines_ahead<T> queries_ahead(const inputs<T>& in, const outputs<T>& out, index batch, index head, const token_chunks& chunks, index chunk,
                             const tensor_view<const T>* local) {
    const auto& s = in.queries.shape();
    const auto group = s.heads / in.keys.shape().heads;
    auto first = chunks.end(chunk), count = first - chunks.first(chunk);
    if (chunk + 1 == chunks.count()) {
        first = 0;
        if (++head == s.heads) head = 0, ++batch;
        if (batch == s.batch) return {};
        if (head % group == 0) return keys_ahead(in, batch, head / group, 0, std::min(in.keys.shape().tokens, count));
    }
    count = std::min(count, s.tokens - first);
    const auto to = rows_of(out.values, batch, head, first);
    return {{rows_of(in.queries, batch, head, first), count, s.channels},
            {{to.data, to.row_stride, to.channel_stride}, count, out.values.shape().channels},
            local ? row_lines<T>{rows_of(*local, batch, head / group, first), count, local->shape().channels} : row_lines<T>{}};
}

} // namespace attn::kernel
