// Swin's relative position table, as the bias of a window.
#pragma once

#include "../core/tensor.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The bias of a window of height x width tokens, row-major, from a table with a number for each head and relative position:
///     bias(0, h, i, j) = table[(y_i - y_j + height - 1) (2 width - 1) + (x_i - x_j + width - 1), h]
/// of shape (1, heads, height width, height width). table: (1, 1, (2 height - 1) (2 width - 1), heads), any strides: a checkpoint's
/// relative_position_bias_table. For additive_bias, which is how it takes part in attention. Throws shape_error for a table of another
/// shape or a window that no tensor can hold. Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
/// and its code.
template <TensorLike V>
[[nodiscard]] tensor<detail::scalar_t<V>> window_bias(const V& table, index_t height, index_t width) {
    using T = detail::scalar_t<V>;
    const tensor_view<const T> from = table;
    const auto& s = from.shape();
    detail::check_view("window_bias", "table", from);
    detail::check_shape<T>("window_bias", "the window", {.tokens = height, .channels = width});
    const auto across = 2 * width - 1, down = 2 * height - 1;
    if (height < 1 || width < 1 || s.batch != 1 || s.heads != 1 ||
        s.tokens != detail::product(std::max<index_t>(down, 0), std::max<index_t>(across, 0)))
        throw shape_error("window_bias", "table", "has shape ", s, ", but a window of ", height, " x ", width, " needs (1, 1, ", down,
                          " x ", across, ", heads)");
    const auto heads = s.channels, tokens = height * width;
    tensor<T> bias({1, heads, tokens, tokens});
    for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < tokens; ++i)
            for (index_t j = 0; j < tokens; ++j) {
                const auto y = i / width - j / width + height - 1, x = i % width - j % width + width - 1;
                bias(0, h, i, j) = from(0, 0, y * across + x, h);
            }
    return bias;
}

} // namespace attn
