// Tokens, as they are written to the pages of a cache.
#pragma once

#include "key_value_pool.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Throws argument_error if rows are to be quantised and are not finite.
template <Scalar T>
void check_finite(const char* what, const stored_view<const T>& rows, const kernel::row_format& format) {
    if (!format.is_quantised()) return;
    std::vector<T> row(static_cast<std::size_t>(format.channels));
    for_each_row(rows.shape(), [&](index_t b, index_t h, index_t i) {
        kernel::copy_rows<T>(rows.rows(b, h, i), 1, format.channels, row.data(), format.channels);
        if (!format.quantised().fits(row.data()))
            detail::raise(argument_error("sequence::append", what, "have numbers in row ", i, " of head ", h,
                                         " that are not finite, or too large to be quantised"));
    });
}

/// Writes some tokens to the rows of a page from one on. numbers, memory: of a row, and of one as it is stored.
template <Scalar T>
void write_tokens(const stored_view<const T>& from, const row_range& tokens, std::byte* page, index_t row, const kernel::page_part& part,
                  T* numbers, std::byte* memory) {
    const auto channels = part.format.channels;
    for (index_t head = 0; head < from.shape().heads; ++head) {
        const auto rows = from.rows(0, head, tokens.first);
        for (index_t r = 0; r < tokens.count; ++r) {
            kernel::copy_rows<T>(rows.from(r), 1, channels, numbers, channels);
            if (part.format.is_quantised()) part.format.quantised().write(numbers, memory);
            else kernel::store_row<T>(numbers, channels, stored_rows<T>{memory, part.format.narrow, channels, 1});
            part.of_head(head).template write_row<T>(memory, row + r, page);
        }
    }
}

} // namespace attn::detail
