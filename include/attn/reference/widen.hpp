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
    const auto [batch, heads, tokens, channels] = from.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < tokens; ++i)
                for (index_t c = 0; c < channels; ++c) to(b, h, i, c) = static_cast<double>(from(b, h, i, c));
    return to;
}

} // namespace attn::reference
