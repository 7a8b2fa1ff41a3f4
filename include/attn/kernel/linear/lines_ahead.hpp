// Brings the next block of linear attention closer, beside the terms of the micro-kernel.
#pragma once

#include "../../core/inputs.hpp"
#include "../tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Rows that will soon be read or written: row r begins at data + r * stride. None, if they do not lie in lines of memory.
template <Scalar T>
struct coming_rows {
    static constexpr index line = 64 / sizeof(T);
    static constexpr index lines(index channels) { return (channels + line - 1) / line; }

    const T* data = nullptr;
    index stride = 0;

    coming_rows() = default;
    coming_rows(const row_block<const T>& rows) : data(rows.channel_stride == 1 ? rows.data : nullptr), stride(rows.row_stride) {}

    /// Asks for lines [first, end) of `count` rows from `row` on.
    [[gnu::always_inline]] void fetch(index row, index count, index first, index end) const {
        if (!data) return;
        for (; first < end; ++first) {
            const T* at = data + row * stride + first * line;
            for (index r = 0; r < count; ++r, at += stride) simd::prefetch(at);
        }
    }
};

/// What follows a block of keys. A tile of S meets each key of the block in one of its terms, and there asks for a line or two of the same
/// row of the next block: that is all the address needs. A general walk over lines takes some twenty instructions for two of them, which the
/// multiply-adds of a term do not hide.
template <Scalar T>
struct keys_ahead {
    coming_rows<T> keys, values;
    index key_lines = 0, lines = 0; ///< of a row of keys, and of both

    keys_ahead() = default;
    /// From key `first` on.
    keys_ahead(const inputs<T>& in, index batch, index kv_head, index first) {
        const auto &k = in.keys.shape(), &v = in.values.shape();
        if (first >= k.tokens) return;
        keys = rows_of(in.keys, batch, kv_head, first);
        values = rows_of(in.values, batch, kv_head, first);
        key_lines = coming_rows<T>::lines(k.channels);
        lines = key_lines + coming_rows<T>::lines(v.channels);
    }

    /// One line of each row, one after the other.
    struct column {
        const T* at;
        index step;

        [[gnu::always_inline]] void fetch() {
            simd::prefetch(at);
            at += step;
        }
    };
    /// Line `number`, if it is before `end`; else what is at `otherwise`, in the cache already, again and again.
    column line(index number, index end, const T* otherwise) const {
        const bool of_keys = number < key_lines;
        const auto& rows = of_keys ? keys : values;
        if (number >= end || !rows.data) return {otherwise, 0};
        return {rows.data + (of_keys ? number : number - key_lines) * coming_rows<T>::line, rows.stride};
    }
};

/// What follows a chunk of queries.
template <Scalar T>
struct queries_ahead {
    coming_rows<T> queries, results, local;

    queries_ahead() = default;
    /// Behind the rows first .. end - 1: the next chunk, with where its results go and, if not null, its rows of `local`; or the keys and
    /// values of another head. Results are asked for two tiles ahead.
    queries_ahead(const inputs<T>& in, const outputs<T>& out, index batch, index head, index first, index end,
                  const tensor_view<const T>* locals, index two_tiles) {
        const auto& s = in.queries.shape();
        const auto group = s.heads / in.keys.shape().heads;
        auto next = end;
        if (end == s.tokens) {
            next = 0;
            if (++head == s.heads) head = 0, ++batch;
            if (batch == s.batch) return;
        }
        if (next == 0 && head % group == 0) {
            queries = rows_of(in.keys, batch, head / group);
            results = rows_of(in.values, batch, head / group);
            return;
        }
        queries = rows_of(in.queries, batch, head, next);
        const auto to = rows_of(out.values, batch, head, next == 0 ? 0 : first + two_tiles);
        results = row_block<const T>{to.data, to.row_stride, to.channel_stride};
        if (locals) local = rows_of(*locals, batch, head / group, next);
    }
};

} // namespace attn::kernel
