// Two-dimensional windows: an image's tokens as windows that attend by themselves, shifted every other layer.
#pragma once

#include "../core/tensor_view.hpp"
#include "../pattern/segments.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Cuts a height x width grid of tokens, row by row, into windows that do not overlap, after a cyclic shift of the grid:
///     token (r, c) of window (y, x) is the grid's token ((y window_height + r + shift_height) mod height, (x window_width + c +
///     shift_width) mod width)
/// Windows become batch entries: window w of image b is entry b windows() + w. Attention over shifted windows must not join the grid's
/// opposite edges, which lie side by side in its last windows: `shift_segments` is the pattern that keeps them apart.
///     const window_grid grid{.height = 56, .width = 56, .window_height = 7, .window_width = 7, .shift_height = 3, .shift_width = 3};
///     grid.partition(q, q_windows);                    // and k, v
///     attend(softmax_attention{.pattern = grid.shift_segments()}, q_windows, ...);
///     grid.reverse(out_windows, out);
/// Every member throws shape_error unless the windows divide the grid and each shift is in [0, window).
/// Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows.
struct window_grid {
    index height, width;
    index window_height, window_width;
    index shift_height = 0, shift_width = 0;

    /// Windows of one image.
    index windows() const {
        if (window_height < 1 || window_width < 1) [[unlikely]]
            check_sizes("window_grid"); // which throws: layers ask for sizes before they check
        return detail::product(height / window_height, width / window_width);
    }
    /// Tokens of one window.
    index window_tokens() const { return detail::product(window_height, window_width); }
    /// Where token `token` of window `window` lies in the grid.
    index grid_token(index window, index token) const {
        const auto across = width / window_width;
        const auto row = (window / across * window_height + token / window_width + shift_height) % height;
        return row * width + (window % across * window_width + token % window_width + shift_width) % width;
    }

    /// Calls f(token of the grid, token of the window) for each token of a window, in the window's order: grid_token without divisions.
    template <class F>
    void for_each_token(index window, F&& f) const {
        const auto across = width / window_width;
        const auto top = window / across * window_height + shift_height, left = window % across * window_width + shift_width;
        for (index y = 0; y < window_height; ++y) {
            const auto row = top + y < height ? top + y : top + y - height;
            for (index x = 0; x < window_width; ++x) {
                const auto column = left + x < width ? left + x : left + x - width;
                f(row * width + column, y * window_width + x);
            }
        }
    }

    /// The windows of images: from (batch, heads, height width, channels) to (batch windows(), heads, window_tokens(), channels).
    /// Both have any strides. Throws shape_error if shapes do not fit, or the two overlap.
    template <Scalar T>
    void partition(const std::type_identity_t<tensor_view<const T>>& image, const tensor_view<T>& windowed) const {
        check("window_grid::partition", image, "image", windowed, "windows", image.shape(), windowed.shape());
        for_each_row(image.shape(), [&](index b, index entry, index h, index from, index to) {
            copy_channels(image.row(b, h, from), image.strides().channel, windowed.row(entry, h, to), windowed.strides().channel,
                          image.shape().channels);
        });
    }
    /// The images of windows: what `partition` did, undone, the shift with it.
    template <Scalar T>
    void reverse(const std::type_identity_t<tensor_view<const T>>& windowed, const tensor_view<T>& image) const {
        check("window_grid::reverse", windowed, "windows", image, "image", image.shape(), windowed.shape());
        for_each_row(image.shape(), [&](index b, index entry, index h, index to, index from) {
            copy_channels(windowed.row(entry, h, from), windowed.strides().channel, image.row(b, h, to), image.strides().channel,
                          image.shape().channels);
        });
    }

    /// Which tokens of a window may see each other: those that were neighbours before the shift. One region if there is no shift.
    segments shift_segments() const {
        check_sizes("window_grid::shift_segments");
        std::vector<std::int32_t> ids;
        ids.reserve(static_cast<std::size_t>(height * width));
        // In shifted coordinates the last `shift` rows and columns come from the grid's first.
        const auto wrapped = [](index at, index size, index shift) { return at >= size - shift ? 1 : 0; };
        const auto across = width / window_width;
        for (index w = 0; w < windows(); ++w)
            for (index t = 0; t < window_tokens(); ++t)
                ids.push_back(2 * wrapped(w / across * window_height + t / window_width, height, shift_height) +
                              wrapped(w % across * window_width + t % window_width, width, shift_width));
        return segments(ids, windows());
    }

    /// Throws shape_error, in the name of `operation`, unless windows and shifts fit the grid.
    void check_sizes(std::string_view operation) const {
        const auto grid = std::to_string(height) + " x " + std::to_string(width),
                   window = std::to_string(window_height) + " x " + std::to_string(window_width);
        if (height < 1 || width < 1) throw shape_error(operation, "grid", "of " + grid + " tokens is empty");
        if (detail::product(height, width) > max_bytes) throw shape_error(operation, "grid", "of " + grid + " tokens is too large");
        if (window_height < 1 || window_width < 1 || height % window_height != 0 || width % window_width != 0)
            throw shape_error(operation, "window", "of " + window + " tokens does not divide the grid of " + grid);
        if (shift_height < 0 || shift_width < 0 || shift_height >= window_height || shift_width >= window_width)
            throw shape_error(operation, "shift",
                              "of " + std::to_string(shift_height) + " x " + std::to_string(shift_width) +
                                  " tokens does not lie within the window of " + window);
    }
    /// The same, and unless a tensor holds the tokens of the grid.
    void check_tokens(std::string_view operation, std::string_view argument, const shape& tokens) const {
        check_sizes(operation);
        if (tokens.tokens != height * width)
            throw shape_error(operation, argument,
                              "has shape " + to_string(tokens) + ", but the grid has " + std::to_string(height * width) + " tokens");
    }

private:
    template <class T>
    void check(std::string_view operation, const tensor_view<const T>& from, std::string_view from_name, const tensor_view<T>& to,
               std::string_view to_name, const shape& image, const shape& windowed) const {
        detail::check_view(operation, from_name, from);
        detail::check_view(operation, to_name, to);
        check_tokens(operation, "image", image);
        const shape expected{image.batch * windows(), image.heads, window_tokens(), image.channels};
        if (windowed != expected)
            throw shape_error(operation, "windows",
                              "has shape " + to_string(windowed) + ", but the image of shape " + to_string(image) + " gives " +
                                  to_string(expected));
        if (overlaps_itself(to))
            throw shape_error(operation, to_name, "of shape " + to_string(to.shape()) + " has strides by which its elements overlap");
        if (overlap(to, from))
            throw shape_error(operation, to_name, "of shape " + to_string(to.shape()) + " overlaps " + std::string(from_name));
    }
    /// f(image, entry, head, token of the image, token of the window).
    template <class F>
    void for_each_row(const shape& image, F&& f) const {
        for (index b = 0; b < image.batch; ++b)
            for (index w = 0; w < windows(); ++w)
                for (index h = 0; h < image.heads; ++h)
                    for_each_token(w, [&](index of_image, index of_window) { f(b, b * windows() + w, h, of_image, of_window); });
    }
    template <class T>
    static void copy_channels(const T* from, index from_stride, T* to, index to_stride, index channels) {
        if (from_stride == 1 && to_stride == 1)
            std::copy_n(from, channels, to);
        else
            for (index c = 0; c < channels; ++c) to[c * to_stride] = from[c * from_stride];
    }
};

} // namespace attn
