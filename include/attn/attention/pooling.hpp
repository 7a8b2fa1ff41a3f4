// Projections along the sequence that pool bins of neighbouring tokens.
#pragma once

#include "projection_concept.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Mean pooling: the mean of the visible tokens of each of `projected` bins. Bin r of m tokens is floor(r m / projected) to
/// ceil((r + 1) m / projected) - 1.
struct mean_pooling {
    index_t projected = 1;

    index_t size(index_t, index_t) const { return projected; }
    kernel::token_range range(index_t, index_t row, index_t tokens) const {
        return {row * tokens / projected, ((row + 1) * tokens + projected - 1) / projected};
    }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const {
        if (projected < 1) context.refuse("pools to ", projected, " rows: at least one is needed");
    }
    void check_apart(const output_memory&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T>;
        for (index_t r = 0; r < count; ++r) {
            const auto bin = range(head, first + r, x.count);
            const auto seen = x.count_visible(bin);
            kernel::reduce_tokens<T>(
                x, bin, to.data + r * to.row_stride, [](index_t, index_t) { return lanes(T{0}); },
                [](lanes sum, index_t, lanes token, index_t, index_t) { return sum + token; },
                [&](lanes sum) { return sum / lanes(seen); });
        }
    }

    template <Scalar>
    using gradients = no_gradients;
    template <Scalar T>
    std::size_t backward_workspace_bytes(index_t, index_t) const {
        return 0;
    }
    template <Scalar T>
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch&) const {
        using lanes = simd::lanes<T>;
        for (index_t r = 0; r < count; ++r) {
            const auto bin = range(head, first + r, x.count);
            const auto seen = x.count_visible(bin);
            for (auto j = bin.first; j < bin.end; ++j) {
                if (!x.visible(j)) continue;
                kernel::update_channels(
                    to.data + j * to.row_stride, to.channel_stride, x.channels, [&](lanes sum, index_t c, index_t present) {
                        return sum + kernel::load_channels<T>(d_out.data + r * d_out.row_stride, 1, c, present) / lanes(seen);
                    });
            }
        }
    }
};

/// Max pooling: the largest number of each channel over the visible tokens of each bin, NaN if one of them is; the bins are those of
/// mean_pooling.
struct max_pooling {
    index_t projected = 1;

    index_t size(index_t, index_t) const { return projected; }
    kernel::token_range range(index_t head, index_t row, index_t tokens) const { return mean_pooling{projected}.range(head, row, tokens); }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const { mean_pooling{projected}.check(context); }
    void check_apart(const output_memory&) const {}
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T>;
        for (index_t r = 0; r < count; ++r) {
            kernel::reduce_tokens<T>(
                x, range(head, first + r, x.count), to.data + r * to.row_stride,
                [](index_t, index_t) { return lanes(-std::numeric_limits<T>::infinity()); },
                [](lanes largest, index_t, lanes token, index_t, index_t) {
                    // A NaN is neither above nor equal: it comes in, and stays.
                    return select(token > largest || token != token, token, largest);
                },
                [](lanes largest) { return largest; });
        }
    }

    template <Scalar>
    using gradients = no_gradients;
    template <Scalar T>
    std::size_t backward_workspace_bytes(index_t, index_t channels) const {
        return detail::bytes_taken([&](detail::scratch& memory) { return memory.take<T>(channels), memory.take<index_t>(channels); });
    }
    /// Adds the gradient of each row to the token whose number was taken: of equal ones the first, of NaN the last.
    template <Scalar T>
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch& memory) const {
        T* const largest = memory.take<T>(x.channels);
        index_t* const taken = memory.take<index_t>(x.channels);
        for (index_t r = 0; r < count; ++r) {
            const auto bin = range(head, first + r, x.count);
            std::fill_n(largest, x.channels, -std::numeric_limits<T>::infinity());
            std::fill_n(taken, x.channels, index_t{-1});
            for (auto j = bin.first; j < bin.end; ++j)
                for (index_t c = 0; x.visible(j) && c < x.channels; ++c)
                    if (const T value = x(j, c); value > largest[c] || value != value) largest[c] = value, taken[c] = j;
            for (index_t c = 0; c < x.channels; ++c)
                if (taken[c] >= 0) to.data[taken[c] * to.row_stride + c * to.channel_stride] += d_out.data[r * d_out.row_stride + c];
        }
    }
};

} // namespace attn
