// Copies of tensors, between any memory layouts.
#pragma once

#include "output_memory.hpp"
#include "tensor.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Copies the numbers of a view to another of the same shape.
template <class T>
void copy_numbers(const tensor_view<const T>& from, const tensor_view<T>& to) {
    for_each_number(to.shape(), [&](index_t b, index_t h, index_t i, index_t c) { to(b, h, i, c) = from(b, h, i, c); });
}

/// What a view is deduced from: a tensor, a view, an mdspan.
template <class V>
concept HasView = requires(V& of) { tensor_view(of); };

} // namespace detail

/// Copies a tensor, or a view, to another of the same shape: to(b, h, i, c) = from(b, h, i, c). Both have numbers of the same type, and any
/// strides. Throws shape_error, before anything is written, if the shapes differ, one has no memory, or they overlap.
template <detail::HasView From, detail::HasView To>
void copy(const From& from, To&& to) {
    const tensor_view source = from;
    const tensor_view result = to;
    using number = typename decltype(result)::element_type;
    constexpr bool alike = std::same_as<const number, const typename decltype(source)::element_type> && !std::is_const_v<number>;
    static_assert(alike, "attn: copy is from numbers of one type to such numbers, which are not const");
    if constexpr (alike) {
        const auto& s = source.shape();
        detail::check_view("copy", "from", source);
        if (result.shape() != s) detail::raise(shape_error("copy", "to", "has shape ", result.shape(), ", but from has ", s));
        detail::check_view("copy", "to", result);
        detail::check_writable("copy", "to", result);
        output_memory("copy", "to", result).require_apart("from", source);
        detail::copy_numbers<number>(source, result);
    }
}

/// Copies a tensor, or a view, to a new tensor: see copy(from, to).
template <detail::HasView From>
[[nodiscard]] auto copy(const From& from) {
    const tensor_view source = from;
    detail::check_view("copy", "from", source);
    tensor<std::remove_const_t<typename decltype(source)::element_type>> result(source.shape());
    copy(source, result);
    return result;
}

} // namespace attn
