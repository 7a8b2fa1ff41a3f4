// Rows of channels, which layers compute with, and the heads of attention, as views of the same memory.
#pragma once

#include "stored_view.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// A tensor that outlives the call, or a view, which may be a temporary: of these another view can be made.
template <class V>
concept Viewable = std::is_lvalue_reference_v<V> || requires(V view) { view.strides(); };

} // namespace detail

/// The heads (batch, heads, tokens, channels / heads) of rows (batch, 1, tokens, channels): head h has channels h channels / heads and the
/// following. A view of the same memory, of any strides; of a tensor or a view. Throws shape_error, or argument_error for fewer heads than
/// one.
template <detail::Viewable V>
[[nodiscard]] auto split_heads(V&& rows, index_t heads) {
    const tensor_view from = rows;
    const auto& s = from.shape();
    const auto& d = from.strides();
    detail::check_view("split_heads", "rows", from);
    if (heads < 1) detail::raise(argument_error("split_heads", "heads", "are ", heads, ": one at least is needed"));
    if (s.heads != 1 || s.channels % heads != 0)
        detail::raise(
            shape_error("split_heads", "rows", "have shape ", s, ", but (batch, 1, tokens, a multiple of ", heads, ") is needed"));
    const auto channels = s.channels / heads;
    return tensor_view(from.data(), shape{s.batch, heads, s.tokens, channels},
                       strides{d.batch, channels * d.channels, d.tokens, d.channels});
}

/// The rows (batch, 1, tokens, heads channels) that heads (batch, heads, tokens, channels) lie in, side by side: what split_heads did,
/// undone. Throws shape_error unless a head's channels follow those of the head before.
template <detail::Viewable V>
[[nodiscard]] auto join_heads(V&& heads) {
    const tensor_view from = heads;
    const auto& s = from.shape();
    const auto& d = from.strides();
    detail::check_view("join_heads", "heads", from);
    if (s.heads > 1 && s.channels > 0 && d.heads != s.channels * d.channels)
        detail::raise(
            shape_error("join_heads", "heads", "of shape ", s, " have a head stride of ", d.heads, ": they do not lie side by side"));
    return tensor_view(from.data(), shape{s.batch, 1, s.tokens, detail::product(s.heads, s.channels)},
                       strides{d.batch, 0, d.tokens, d.channels});
}

} // namespace attn
