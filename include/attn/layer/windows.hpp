// Two-dimensional windows: an image's tokens as windows that attend by themselves, shifted every other layer.
#pragma once

#include "../core/tensor.hpp"
#include "../parallel/executor.hpp"
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
///     const auto grid = window_grid::square(56, 7, 3);
///     const auto windows = window_partition(grid, q);    // and k, v
///     const auto out = attend(softmax_attention{.pattern = grid.shift_segments()}, windows, ...);
///     const auto result = window_reverse(grid, out);
/// Every member throws argument_error unless the windows divide the grid and each shift is in [0, window).
/// Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows.
struct window_grid {
    index_t height, width;
    index_t window_height, window_width;
    index_t shift_height = 0, shift_width = 0;

    /// A square grid in square windows, shifted by as much down as to the right.
    static constexpr window_grid square(index_t side, index_t window, index_t shift = 0) {
        return {side, side, window, window, shift, shift};
    }

    /// Windows of one image.
    index_t windows() const {
        if (window_height < 1 || window_width < 1) [[unlikely]]
            check_sizes("window_grid"); // which throws: layers ask for sizes before they check
        return detail::product(height / window_height, width / window_width);
    }
    /// Tokens of one window.
    index_t window_tokens() const { return detail::product(window_height, window_width); }
    /// Where token `token` of window `window` lies in the grid.
    index_t grid_token(index_t window, index_t token) const {
        const auto across = width / window_width;
        const auto row = (window / across * window_height + token / window_width + shift_height) % height;
        return row * width + (window % across * window_width + token % window_width + shift_width) % width;
    }

    /// Calls f(token of the grid, token of the window) for each token of a window, in the window's order: grid_token without divisions.
    void for_each_token(index_t window, auto&& f) const {
        const auto across = width / window_width;
        const auto top = window / across * window_height + shift_height, left = window % across * window_width + shift_width;
        for (index_t y = 0; y < window_height; ++y) {
            const auto row = top + y < height ? top + y : top + y - height;
            for (index_t x = 0; x < window_width; ++x) {
                const auto column = left + x < width ? left + x : left + x - width;
                f(row * width + column, y * window_width + x);
            }
        }
    }

    /// The shape of the windows of images.
    shape windows_of(const shape& image) const {
        return {detail::product(image.batch, windows()), image.heads, window_tokens(), image.channels};
    }
    /// Which tokens of a window may see each other: those that were neighbours before the shift. One region if there is no shift.
    segments shift_segments() const {
        check_sizes("window_grid::shift_segments");
        std::vector<std::int32_t> ids;
        ids.reserve(static_cast<std::size_t>(height * width));
        for (index_t w = 0; w < windows(); ++w)
            for_each_token(w, [&](index_t token, index_t) { // the shift took the grid's first rows and columns to the last windows
                ids.push_back(2 * (token / width < shift_height) + (token % width < shift_width));
            });
        return segments(ids, windows());
    }

    /// Throws argument_error, in the name of `operation`, unless windows and shifts fit the grid.
    void check_sizes(std::string_view operation) const {
        const auto grid = std::to_string(height) + " x " + std::to_string(width),
                   window = std::to_string(window_height) + " x " + std::to_string(window_width);
        if (height < 1 || width < 1) detail::raise(argument_error(operation, "grid", "of ", grid, " tokens is empty"));
        if (detail::product(height, width) > max_bytes)
            detail::raise(argument_error(operation, "grid", "of ", grid, " tokens is too large"));
        if (window_height < 1 || window_width < 1 || height % window_height != 0 || width % window_width != 0)
            detail::raise(argument_error(operation, "window", "of ", window, " tokens does not divide the grid of ", grid));
        if (shift_height < 0 || shift_width < 0 || shift_height >= window_height || shift_width >= window_width)
            detail::raise(argument_error(operation, "shift", "of ", shift_height, " x ", shift_width,
                                         " tokens does not lie within the window of ", window));
    }
    /// Throws attention_error unless windows and shifts fit the grid, and the tensor `argument` holds the tokens of the grid.
    void check_tokens(std::string_view operation, std::string_view argument, const shape& tokens) const {
        check_sizes(operation);
        if (tokens.tokens != height * width)
            detail::raise(shape_error(operation, argument, "has shape ", tokens, ", but the grid has ", height * width, " tokens"));
    }
};

namespace detail {

/// Throws shape_error unless windows and images belong together, one of which is read, and the other can be written.
template <class T>
void check_windows(const window_grid& grid, const tensor_view<const T>& from, const tensor_view<T>& to, bool to_windows) {
    const std::string_view operation = to_windows ? "window_partition" : "window_reverse";
    const std::string_view from_name = to_windows ? "image" : "windows", to_name = to_windows ? "windows" : "image";
    const auto &image = to_windows ? from.shape() : to.shape(), &windows = to_windows ? to.shape() : from.shape();
    check_view(operation, from_name, from);
    check_view(operation, to_name, to);
    grid.check_tokens(operation, "image", image);
    const auto expected = grid.windows_of(image);
    if (windows != expected)
        detail::raise(shape_error(operation, "windows", "has shape ", windows, ", but the image of shape ", image, " gives ", expected));
    check_writable(operation, to_name, to);
    if (overlap(to, from)) detail::raise(shape_error(operation, to_name, "of shape ", to.shape(), " overlaps ", from_name));
}

/// Calls f(image, token of the image, window, token of the window) for each token, in parallel: window w of image b is entry b windows() +
/// w.
void for_each_window_token(const window_grid& grid, index_t images, const execution& run, const auto& f) {
    run.for_each(images * grid.windows(), [&](index_t entry, index_t) {
        grid.for_each_token(entry % grid.windows(),
                            [&](index_t of_image, index_t of_window) { f(entry / grid.windows(), of_image, entry, of_window); });
    });
}

/// The channels of one token, in all heads.
template <class T>
void copy_token(const tensor_view<const T>& from, index_t from_batch, index_t from_token, const tensor_view<T>& to, index_t to_batch,
                index_t to_token) {
    for (index_t h = 0; h < from.shape().heads; ++h) {
        const T* const source = from.row(from_batch, h, from_token);
        T* const target = to.row(to_batch, h, to_token);
        const auto from_stride = from.strides().channels, to_stride = to.strides().channels;
        if (from_stride == 1 && to_stride == 1) std::copy_n(source, from.shape().channels, target);
        else
            for (index_t c = 0; c < from.shape().channels; ++c) target[c * to_stride] = source[c * from_stride];
    }
}

/// window_partition, or window_reverse, of which everything has been checked.
template <class T>
void copy_windows(const window_grid& grid, const tensor_view<const T>& from, const tensor_view<T>& to, bool to_windows,
                  const execution& run) {
    const auto images = (to_windows ? from.shape() : to.shape()).batch;
    for_each_window_token(grid, images, run, [&](index_t b, index_t of_image, index_t entry, index_t of_window) {
        if (to_windows) copy_token(from, b, of_image, to, entry, of_window);
        else copy_token(from, entry, of_window, to, b, of_image);
    });
}

} // namespace detail

/// The windows of images: from (batch, heads, height width, channels) to (batch windows(), heads, window_tokens(), channels), of any
/// strides. Throws attention_error, before anything is read or written, if shapes do not fit, or the two overlap.
template <TensorLike V>
void window_partition(const window_grid& grid, const V& image, const tensor_view<detail::scalar_t<V>>& windows,
                      const detail::call_execution& run = {}) {
    detail::check_windows<detail::scalar_t<V>>(grid, image, windows, true);
    detail::copy_windows<detail::scalar_t<V>>(grid, image, windows, true, run);
}

/// The windows of images, to a new tensor: see window_partition(grid, image, windows, run).
template <TensorLike V>
[[nodiscard]] auto window_partition(const window_grid& grid, const V& image, const detail::call_execution& run = {}) {
    grid.check_tokens("window_partition", "image", image.shape());
    tensor<detail::scalar_t<V>> windows(grid.windows_of(image.shape()));
    window_partition(grid, image, windows, run);
    return windows;
}

/// The images of windows: what window_partition did, undone, the shift with it. Throws like it.
template <TensorLike V>
void window_reverse(const window_grid& grid, const V& windows, const tensor_view<detail::scalar_t<V>>& image,
                    const detail::call_execution& run = {}) {
    detail::check_windows<detail::scalar_t<V>>(grid, windows, image, false);
    detail::copy_windows<detail::scalar_t<V>>(grid, windows, image, false, run);
}

/// The images of windows, to a new tensor: see window_reverse(grid, windows, image, run).
template <TensorLike V>
[[nodiscard]] auto window_reverse(const window_grid& grid, const V& windows, const detail::call_execution& run = {}) {
    grid.check_sizes("window_reverse");
    const auto& s = windows.shape();
    tensor<detail::scalar_t<V>> image({s.batch / grid.windows(), s.heads, grid.height * grid.width, s.channels});
    window_reverse(grid, windows, image, run);
    return image;
}

} // namespace attn
