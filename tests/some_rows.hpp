// Some rows of a tensor, where they lie: what a call that was cut is given.
#pragma once

#include <attn/core/stored_view.hpp>

namespace attn::testing {

/// Rows first .. first + count - 1 of every batch entry and head; of a tensor without memory, rows without memory.
template <class T>
tensor_view<T> some_rows(const tensor_view<T>& t, index_t first, index_t count) {
    auto s = t.shape();
    s.tokens = count;
    return {t.data() ? t.row(0, 0, first) : nullptr, s, t.strides()};
}
template <class T>
stored_view<T> some_rows(const stored_view<T>& t, index_t first, index_t count) {
    auto s = t.shape();
    s.tokens = count;
    return {t.rows(0, 0, first).data, t.format(), s, t.strides()};
}
template <class T>
tensor_view<const T> some_rows(const tensor<T>& t, index_t first, index_t count) {
    return some_rows(t.view(), first, count);
}

} // namespace attn::testing
