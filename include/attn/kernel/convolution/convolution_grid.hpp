// What a depthwise convolution moves over, and with which parameters.
#pragma once

#include "../../core/stored_view.hpp"
#include "../../core/workspace.hpp"

#include <algorithm>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A grid of tokens, row-major, and the kernel that moves over it: output (y, x) reads inputs (y - top + ky, x - left + kx).
struct convolution_grid {
    index_t height = 1, width = 0;
    index_t kernel_height = 1, kernel_width = 1;
    index_t top = 0, left = 0;

    index_t taps() const { return detail::product(kernel_height, kernel_width); }
};

/// Cuts tokens into chunks: lines of `line` tokens, each cut evenly into pieces.
struct token_chunks {
    index_t tokens, line, pieces;

    /// Pieces of at most about `target` tokens.
    static token_chunks even(index_t tokens, index_t target) {
        return {tokens, std::max<index_t>(1, tokens), std::max<index_t>(1, (tokens + target - 1) / target)};
    }
    /// Chunks that a grid's rows fall into evenly, as the convolution wants them, of about `target` and at most `limit` tokens.
    static token_chunks of(const convolution_grid& grid, index_t target, index_t limit) {
        const auto tokens = grid.height * grid.width;
        if (grid.width > limit) return {tokens, grid.width, (grid.width + target - 1) / target};
        return {tokens, std::max<index_t>(1, target / std::max<index_t>(1, grid.width)) * std::max<index_t>(1, grid.width), 1};
    }
    index_t count() const { return (tokens + line - 1) / line * pieces; }
    index_t first(index_t chunk) const { return std::min(tokens, chunk / pieces * line + chunk % pieces * line / pieces); }
    index_t end(index_t chunk) const { return std::min(tokens, chunk / pieces * line + (chunk % pieces + 1) * line / pieces); }
    /// Chunks that make up a task of about so many tokens.
    index_t of_a_task(index_t tokens_of_a_task) const { return std::max<index_t>(1, tokens_of_a_task * pieces / line); }
};

/// A convolution with its parameters. weights (1 or heads, channels, kernel_height, kernel_width), null for none; bias: none, one number
/// for each channel, or for each of every head.
template <class U>
struct convolution_parameters {
    convolution_grid grid;
    tensor_view<const U> weights;
    std::span<const U> bias;

    bool present() const { return weights.data() != nullptr; }
    const U* weights_of(index_t head) const { return weights.data() + (weights.shape().batch == 1 ? 0 : head * weights.strides().batch); }
    std::span<const U> bias_of(index_t head) const {
        const auto channels = static_cast<std::size_t>(weights.shape().heads);
        return bias.size() <= channels ? bias : bias.subspan(static_cast<std::size_t>(head) * channels, channels);
    }
};

/// A depthwise convolution that is added to the result. Reads input (batch, kv_heads, n, d_v); if that is the values, those that no query
/// may see count as outside the grid.
template <Scalar T, class U>
struct local_term {
    convolution_parameters<U> convolution;
    stored_view<const T> input;
    bool reads_values = true;
    index_t first_query = 0; ///< the token of the grid that the first query of the call is
};

} // namespace attn::kernel
