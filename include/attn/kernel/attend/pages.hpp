// Keys and values that lie in the pages of a cache: what the reader of key blocks reads there.
#pragma once

#include "../prefetch.hpp"
#include "../rotary_table.hpp"
#include "column_scores.hpp"
#include "key_reader.hpp"
#include "streamed_rows.hpp"

#include <algorithm>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Where the keys or the values of a page lie: rows one after the other, or, in columns, blocks of 16 of them (key_columns).
struct page_part {
    index_t offset = 0;     ///< of the first row, in bytes
    index_t head_bytes = 0; ///< from one head to the next
    index_t row_bytes = 0;
    row_format format = {};
    bool in_columns = false;

    bool operator==(const page_part&) const = default;

    page_part of_head(index_t head) const {
        auto part = *this;
        part.offset += head * head_bytes;
        return part;
    }
    /// Where a row of a page lies, or its block.
    index_t place(index_t row) const { return offset + (row - in_block(row)) * row_bytes; }
    /// A row of a page as it is stored, side by side.
    template <Scalar T>
    void read_row(const std::byte* page, index_t row, std::byte* to) const {
        if (in_columns) gather_row<T>(page + place(row), in_block(row), format, to);
        else std::copy_n(page + place(row), row_bytes, to);
    }
    template <Scalar T>
    void write_row(const std::byte* from, index_t row, std::byte* page) const {
        if (in_columns) scatter_row<T>(from, format, page + place(row), in_block(row));
        else std::copy_n(from, row_bytes, page + place(row));
    }

private:
    index_t in_block(index_t row) const { return in_columns ? row % column_block : 0; }
};

/// The rows of one head, so many in each page. Pages of which nothing is seen may be missing. The first rows of a sequence may be kept as
/// they are beside quantised ones. Keys may be turned by their positions when they are read, as numbers.
template <class T>
struct paged_rows {
    using number = std::remove_const_t<T>;

    const std::byte* const* pages = nullptr; ///< null where one is missing
    index_t page_rows = 1;
    page_part part = {};      ///< of the head
    const T* exact = nullptr; ///< the rows before exact_end
    index_t exact_end = 0;
    const row_turns<number>* turns = nullptr; ///< null if rows are read as they are

    bool operator==(const paged_rows&) const = default;

    const std::byte* page_of(index_t row) const { return pages[row / page_rows]; }
    /// Whether rows are copied as numbers, else as they are stored.
    bool copies_numbers() const { return part.format.is_quantised() || turns; }
    /// Bytes of a row that is copied.
    index_t copied_bytes() const { return copies_numbers() ? part.format.channels * static_cast<index_t>(sizeof(T)) : part.row_bytes; }
    /// Copies a row, not turned; zeros, if its page is missing. memory: of a row as it is stored.
    void copy(index_t row, std::byte* to, std::byte* memory) const {
        const auto& format = part.format;
        if (row < exact_end) {
            std::copy_n(reinterpret_cast<const std::byte*>(exact + row * format.channels), copied_bytes(), to);
        } else if (const auto* const page = page_of(row); !page) {
            std::fill_n(to, copied_bytes(), std::byte{});
        } else if (copies_numbers()) {
            auto* const numbers = reinterpret_cast<number*>(to);
            part.template read_row<number>(page, row % page_rows, memory);
            if (format.is_quantised()) format.quantised().read(memory, numbers);
            else
                copy_rows<number>(stored_rows<const number>{memory, format.narrow, format.channels, 1}, 1, format.channels, numbers,
                                  format.channels);
        } else {
            part.template read_row<number>(page, row % page_rows, to);
        }
    }
    /// Where the rows first, first + step, ... lie, if they are in one page, and none is exact.
    const std::byte* in_one_page(index_t first, index_t count, index_t step) const {
        const auto last = first + (count - 1) * step;
        const bool is_one = count > 0 && first >= exact_end && first / page_rows == last / page_rows;
        return is_one && page_of(first) ? page_of(first) + part.place(first % page_rows) : nullptr;
    }
};
template <class T>
inline constexpr bool gathers<paged_rows<T>> = true;

/// Rows first, first + step, ... as they lie: without data if they are not in one page, or quantised, or in columns.
template <class T>
stored_rows<T> rows_in_place(const paged_rows<T>& head, index_t first, index_t count, index_t step) {
    const auto& format = head.part.format;
    const bool are_rows = !format.is_quantised() && !head.part.in_columns;
    return {are_rows ? head.in_one_page(first, count, step) : nullptr, format.narrow, format.channels * step, 1};
}
/// Copies them to memory: those that are quantised or turned as numbers, others as they are stored; zeros of missing pages.
template <class T>
stored_rows<T> gathered_rows(const paged_rows<T>& head, index_t first, index_t count, index_t step, std::byte* to, std::byte* memory) {
    for (index_t j = 0; j < count; ++j) head.copy(first + j * step, to + j * head.copied_bytes(), memory);
    const auto channels = head.part.format.channels;
    if (auto* const numbers = reinterpret_cast<std::remove_const_t<T>*>(to); head.turns)
        head.turns->turn(first, count, step, 1, [&](index_t j) { return numbers + j * channels; });
    return {to, head.copies_numbers() ? narrow_format::none : head.part.format.narrow, channels, 1};
}
/// Asks for them, in time.
template <class T>
void add_coming(prefetch_next& ahead, const paged_rows<T>& head, index_t first, index_t count, index_t step, index_t) {
    if (const auto* const from = step == 1 ? head.in_one_page(first, count, step) : nullptr)
        ahead.add_bytes(from, count * head.part.row_bytes);
}
/// Bytes to what is read next, if that is known, else 0.
inline index_t bytes_between(const std::byte* from, const std::byte* next) {
    return next ? reinterpret_cast<std::intptr_t>(next) - reinterpret_cast<std::intptr_t>(from) : 0;
}
/// The keys of a run as they lie, if they lie together in columns.
template <class T>
std::optional<key_columns<std::remove_const_t<T>>> columns_in_place(const paged_rows<T>& head, const key_run& run, index_t first_key,
                                                                    const std::byte* next) {
    const auto first = run.first - first_key;
    const auto* const from = head.part.in_columns && run.step == 1 ? head.in_one_page(first, run.count, 1) : nullptr;
    if (!from) return {};
    return key_columns<std::remove_const_t<T>>{from, first % column_block, head.part.format, column_block * head.part.row_bytes,
                                               bytes_between(from, next)};
}
/// Turns the numbers of such keys, in blocks: a register of them at a time where they stand at neighbouring places.
template <class T>
void turn_columns(const paged_rows<const T>& head, const key_run& run, index_t first_key, index_t first_in_block, T* blocks) {
    const auto& turns = *head.turns;
    const auto first = run.first - first_key;
    for (index_t j = 0, count; j < run.count; j += count) {
        const auto at = first_in_block + j, key = at % column_block;
        count = std::min(column_block - key, run.count - j);
        T* const block = blocks + (at - key) * head.part.format.channels;
        if (const auto place = turns.place_of_neighbours(first + j, count); key == 0 && place >= 0)
            turns.table.turn_columns(block, column_block, place, count);
        else turns.turn(first + j, count, 1, column_block, [&](index_t i) { return block + key + i; });
    }
}

/// Calls f(the values of a run) and returns true if they can be read as they lie. next: where what is read next lies, or null.
template <class T>
bool stream_rows(const paged_rows<T>& head, const key_run& run, index_t first_key, const std::byte* next, const auto& f) {
    using number = std::remove_const_t<T>;
    constexpr index_t size = simd::lanes<number>::size;
    const auto& format = head.part.format;
    const bool is_whole = format.channels % (format.is_quantised() ? quantised_rows::group : size) == 0;
    const auto* const from = is_whole || format.are_numbers() ? head.in_one_page(run.first - first_key, run.count, run.step) : nullptr;
    if (!from) return false;
    const auto stream = [&]<class V, bool Whole>(std::type_identity<streamed_rows<V, number, Whole>>) {
        f(streamed_rows<V, number, Whole>{{from, format},
                                          head.part.row_bytes * run.step,
                                          run.count,
                                          whole_registers<number>(format.channels),
                                          run.step == 1 && next ? next : from});
    };
    if (is_whole)
        with_columns<number>(format, [&]<class V>(std::type_identity<V>) { stream(std::type_identity<streamed_rows<V, number>>{}); });
    else stream(std::type_identity<streamed_rows<number, number, false>>{});
    return true;
}

/// How the pages of a cache are laid out, each with the rows of all heads.
struct page_layout {
    index_t page_rows = 1;
    page_part keys, values;
};
/// The keys and values of one sequence.
template <class T>
struct sequence_pages {
    const page_layout* layout;
    const std::byte* const* pages;      ///< from that of the first key on
    const T *exact_keys, *exact_values; ///< [heads][exact_rows][channels] rows that are kept as they are
    index_t exact_rows;
    index_t first_key;
    row_turns<T> turns; ///< of the keys

    paged_rows<const T> keys_of(index_t head) const {
        auto keys = rows(layout->keys, head, exact_keys);
        if (turns.turn_rows()) keys.turns = &turns;
        return keys;
    }
    paged_rows<const T> values_of(index_t head) const { return rows(layout->values, head, exact_values); }

private:
    paged_rows<const T> rows(const page_part& part, index_t head, const T* exact) const {
        const auto exact_end = std::max<index_t>(0, exact_rows - first_key);
        const auto* const first = exact_end > 0 ? exact + (head * exact_rows + first_key) * part.format.channels : nullptr;
        return {pages, layout->page_rows, part.of_head(head), first, exact_end};
    }
};

/// Keys and values lie in pages; other tensors in any way.
struct paged_storage : any_storage {};

template <class T>
struct head_rows<paged_storage, T> {
    using type = paged_rows<const T>;
    static constexpr bool are_paged = true;
    static constexpr index_t few_rows = few_rows_of_columns<T>;
};

} // namespace attn::kernel
