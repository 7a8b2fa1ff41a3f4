// What a layer in shifted windows is checked for: that its attention does not join opposite edges of the grid.
#pragma once

#include "../attention/attention.hpp"
#include "../score/score_function.hpp"
#include "linear.hpp"
#include "windows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Throws shape_error unless the tokens are the grid's.
template <Scalar T>
void check_grid(std::string_view operation, const window_grid& grid, const tensor_view<const T>& tokens) {
    check_tokens(operation, "tokens", tokens, tokens.shape().channels);
    grid.check_tokens(operation, "tokens", tokens.shape());
}

/// Whether an operator lets query i see key j, by its pattern and by its score of an ordinary pair. One that has no pattern lets it.
bool shows(const Attention auto& op, index_t batch, index_t head, index_t i, index_t j) {
    if constexpr (requires { at(op.pattern, batch, head); })
        if (!at(op.pattern, batch, head).visible(i, j)) return false;
    if constexpr (requires { score_at(op.score, batch, head)(0.0, i, j); })
        return score_at(op.score, batch, head)(0.0, i, j) != -std::numeric_limits<double>::infinity();
    else return true;
}

/// Throws argument_error if attention inside a layer joins opposite edges of a shifted grid. It is asked about neighbours in the windows of
/// the first image that hold such edges: whatever knows nothing of the edges shows some of them. What it refers to has been checked.
void check_edges(std::string_view operation, const window_grid& grid, const auto& layer, const positions& where) {
    if constexpr (requires {
                      requires Attention<std::remove_cvref_t<decltype(layer.attention)>>;
                      layer.heads;
                      layer.kv_heads;
                  }) {
        const shape queries{1, layer.heads, 1, 1}, keys{1, layer.kv_heads, 1, 1};
        const auto heads = log_sum_exp_shape(layer.attention, {queries, keys, keys}).heads;
        const auto require_apart = [&](index_t window, index_t a, index_t b) {
            for (index_t h = 0; h < heads; ++h)
                for (const auto& [i, j] : {std::pair{a, b}, std::pair{b, a}})
                    if (shows(layer.attention, window, h, where.first_query[window] + i, where.first_key[window] + j))
                        detail::raise(argument_error(
                            operation, "layer", "shows token ", j, " of window ", window, " to token ", i, ", but the shift of ",
                            grid.shift_height, " x ", grid.shift_width,
                            " took them from opposite edges of the grid: its attention needs the pattern grid.shift_segments()"));
        };
        const auto across = grid.width / grid.window_width, width = grid.window_width;
        const auto row = (grid.window_height - grid.shift_height) * width, column = width - grid.shift_width; // the first that were shifted
        for (index_t w = 0; w < grid.windows(); ++w) {
            if (grid.shift_height > 0 && w / across == grid.height / grid.window_height - 1) {
                require_apart(w, row - 1, row);
                require_apart(w, row - width, row);
            }
            if (grid.shift_width > 0 && w % across == across - 1) require_apart(w, column - 1, column);
        }
    } else if constexpr (requires { layer.attention; }) {
        check_edges(operation, grid, layer.attention, where);
    }
}

} // namespace attn::detail
