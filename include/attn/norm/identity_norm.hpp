// The norm that does nothing: where one was folded away.
#pragma once

#include "norm.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// No norm: out = x, for x (batch, heads, tokens, channels). A transformer_block with it reads its tokens where they are.
template <Scalar T>
struct identity_norm {
    using scalar = T;
    static constexpr std::string_view name = "identity_norm";
    static constexpr bool moves_statistics = false;

    void check(const shape&) const {}
    void check_apart(const output_memory&) const {}
    std::size_t workspace_bytes(const shape&, index_t) const { return 0; }
    std::size_t narrow_workspace_bytes(const shape&, index_t) const { return 0; }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution&) const {
        if (out.data() == x.data()) return;
        const auto [batch, heads, tokens, channels] = x.shape();
        for (index_t b = 0; b < batch; ++b)
            for (index_t h = 0; h < heads; ++h)
                for (index_t i = 0; i < tokens; ++i)
                    for (index_t c = 0; c < channels; ++c) out(b, h, i, c) = x(b, h, i, c);
    }
};

} // namespace attn
