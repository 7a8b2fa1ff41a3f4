// A projection as a user would write one.
#pragma once

#include <attn/attention/projection_concept.hpp>

namespace attn::testing {

/// A user's own projection: every other token.
struct every_other {
    index_t size(index_t, index_t tokens) const { return tokens / 2; }
    kernel::token_range range(index_t, index_t row, index_t) const { return {2 * row, 2 * row + 1}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context&) const {}
    void check_apart(const output_memory&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const row_block<T>& to, detail::scratch&) const {
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) to.data[r * to.row_stride + c] = x(2 * (first + r), c);
    }
};

} // namespace attn::testing
