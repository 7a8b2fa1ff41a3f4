#pragma once

#include "../core/tensor.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// A contiguous copy in double of a view (batch, heads, tokens, channels), exact: what the reference of a float or 16-bit input is computed
/// from.
template <class V>
    requires requires(const V& from) {
        { from(0, 0, 0, 0) } -> std::convertible_to<double>;
    }
tensor<double> widen(const V& from) {
    tensor<double> to(from.shape());
    attn::detail::for_each_number(
        from.shape(), [&](index_t b, index_t h, index_t i, index_t c) { to(b, h, i, c) = static_cast<double>(from(b, h, i, c)); });
    return to;
}

} // namespace attn::reference
