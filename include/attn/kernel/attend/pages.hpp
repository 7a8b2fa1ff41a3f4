// Keys and values that lie in the pages of a cache: what the reader of key blocks reads there.
#pragma once

#include "key_reader.hpp"
#include "quantised.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How the rows of a page lie: of numbers side by side, or quantised.
struct row_format {
    index_t channels = 0;
    narrow_format narrow = narrow_format::none;
    int bits = 0; ///< of a number that is quantised, else 0

    bool is_quantised() const { return bits != 0; }
    quantised_rows quantised() const { return {bits, channels}; }
    /// Bytes of a row whose numbers are computed with in T.
    template <class T>
    index_t row_bytes() const {
        if (is_quantised()) return quantised().row_bytes();
        return channels * (narrow == narrow_format::none ? static_cast<index_t>(sizeof(T)) : 2);
    }
    friend bool operator==(const row_format&, const row_format&) = default;
};

/// The rows of one head, so many in each page, one after the other. Pages of which nothing is seen may be missing. The first rows of a
/// sequence may be kept as they are beside quantised ones.
template <class T>
struct paged_rows {
    const std::byte* const* pages = nullptr; ///< null where one is missing
    index_t page_rows = 1;
    index_t offset = 0; ///< of the head's first row in a page, in bytes
    row_format format = {};
    index_t row_bytes = 0;
    const T* exact = nullptr; ///< the rows before exact_end
    index_t exact_end = 0;

    bool operator==(const paged_rows&) const = default;
};
template <class T>
inline constexpr bool gathers<paged_rows<T>> = true;

/// Rows first, first + step, ... as they lie: without data if they are not in one page, or quantised.
template <class T>
stored_rows<T> rows_in_place(const paged_rows<T>& head, index_t first, index_t count, index_t step) {
    const auto page_of = [&](index_t row) { return row / head.page_rows; };
    const stored_rows<T> none{nullptr, head.format.narrow, head.format.channels * step, 1};
    if (count <= 0 || head.format.is_quantised() || page_of(first) != page_of(first + (count - 1) * step)) return none;
    const auto* const page = head.pages[page_of(first)];
    if (!page) return none;
    return {page + head.offset + first % head.page_rows * head.row_bytes, head.format.narrow, head.format.channels * step, 1};
}
/// Copies them to memory: quantised ones as numbers, others as they are stored; zeros of missing pages.
template <class T>
stored_rows<T> gathered_rows(const paged_rows<T>& head, index_t first, index_t count, index_t step, std::byte* to) {
    using number = std::remove_const_t<T>;
    const auto channels = head.format.channels;
    const auto size = head.format.is_quantised() ? channels * static_cast<index_t>(sizeof(T)) : head.row_bytes;
    for (index_t j = 0; j < count; ++j) {
        const auto row = first + j * step;
        auto* const own = to + j * size;
        const auto* const page = head.pages[row / head.page_rows];
        const auto* const from = page ? page + head.offset + row % head.page_rows * head.row_bytes : nullptr;
        if (row < head.exact_end) std::copy_n(reinterpret_cast<const std::byte*>(head.exact + row * channels), size, own);
        else if (!from) std::fill_n(own, size, std::byte{});
        else if (head.format.is_quantised()) head.format.quantised().read(from, reinterpret_cast<number*>(own));
        else std::copy_n(from, size, own);
    }
    return {to, head.format.narrow, channels, 1};
}

/// How the pages of a cache are laid out, each with the rows of all heads.
struct page_layout {
    /// The rows of a tensor.
    struct part {
        index_t offset = 0;     ///< of the first head, in bytes
        index_t head_bytes = 0; ///< from one head to the next
        index_t row_bytes = 0;
        row_format format = {};
    };
    index_t page_rows = 1;
    part keys, values;
};
/// The keys and values of one sequence.
template <class T>
struct sequence_pages {
    const page_layout* layout;
    const std::byte* const* pages;      ///< from that of the first key on
    const T *exact_keys, *exact_values; ///< [heads][exact_rows][channels] rows that are kept as they are
    index_t exact_rows;
    index_t first_key;

    paged_rows<const T> keys_of(index_t head) const { return rows(layout->keys, head, exact_keys); }
    paged_rows<const T> values_of(index_t head) const { return rows(layout->values, head, exact_values); }

private:
    paged_rows<const T> rows(const page_layout::part& part, index_t head, const T* exact) const {
        const auto exact_end = std::max<index_t>(0, exact_rows - first_key);
        return {pages,       layout->page_rows, part.offset + head * part.head_bytes,
                part.format, part.row_bytes,    exact_end > 0 ? exact + (head * exact_rows + first_key) * part.format.channels : nullptr,
                exact_end};
    }
};

/// Keys and values lie in pages; other tensors in any way.
struct paged_storage : any_storage {};

template <class T>
struct head_rows<paged_storage, T> {
    using type = paged_rows<const T>;
    static constexpr bool are_paged = true;
};

} // namespace attn::kernel
