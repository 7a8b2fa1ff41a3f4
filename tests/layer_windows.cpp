// Windows of images, against the roll and the slices of Swin's own description.
#include "catch.hpp"
#include "errors.hpp"
#include "problems.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/core/tensor.hpp>
#include <attn/layer/windows.hpp>
#include <attn/pattern/tiles.hpp>

#include <algorithm>
#include <numeric>

namespace attn::testing {

using namespace pattern;

namespace {

/// Which window a token falls into, and which of the slices [0, n - window), [n - window, n - shift), [n - shift, n) of the shifted grid.
struct place {
    index_t window, slice;
    bool operator==(const place&) const = default;
};
place place_of(index_t at, index_t size, index_t window, index_t shift) {
    const auto shifted = (at + size - shift) % size;
    return {shifted / window, shifted < size - window ? 0 : shifted < size - shift ? 1 : 2};
}
std::pair<place, place> place_of(const window_grid& g, index_t token) {
    return {place_of(token / g.width, g.height, g.window_height, g.shift_height),
            place_of(token % g.width, g.width, g.window_width, g.shift_width)};
}

const std::vector<window_grid> grids{window_grid::square(6, 3), window_grid::square(6, 2, 1), {.height = 8, .width = 12, .window_height = 4, .window_width = 4},
                                     {.height = 8, .width = 12, .window_height = 4, .window_width = 4, .shift_height = 2, .shift_width = 2},
                                     {.height = 6, .width = 15, .window_height = 3, .window_width = 5, .shift_height = 1, .shift_width = 4},
                                     {.height = 7, .width = 7, .window_height = 7, .window_width = 7, .shift_height = 3, .shift_width = 0},
                                     {.height = 1, .width = 6, .window_height = 1, .window_width = 2, .shift_height = 0, .shift_width = 1}};

tensor<float> partitioned(const window_grid& g, const tensor<float>& image) {
    const auto& s = image.shape();
    tensor<float> windows({s.batch * g.windows(), s.heads, g.window_tokens(), s.channels});
    window_partition(g, image.view(), windows.view());
    return windows;
}

} // namespace

TEST_CASE("windows: a shifted grid by hand", "[layer]") {
    const window_grid grid{.height = 2, .width = 4, .window_height = 2, .window_width = 2, .shift_height = 1, .shift_width = 1};
    tensor<float> image({1, 1, 8, 1});
    std::iota(image.data(), image.data() + 8, 0.0f);
    const auto windows = partitioned(grid, image);
    CHECK(std::vector(windows.data(), windows.data() + 8) == std::vector<float>{5, 6, 1, 2, 7, 4, 3, 0});
}

TEST_CASE("windows: every token lies in the window it is said to, and comes back", "[layer]") {
    for (const auto& grid : grids) {
        const auto image = random_tensor<float>({2, 3, grid.height * grid.width, 5}, 1);
        const auto windows = partitioned(grid, image);
        std::vector<index_t> seen(static_cast<std::size_t>(grid.height * grid.width));
        for (index_t w = 0; w < grid.windows(); ++w)
            for (index_t t = 0; t < grid.window_tokens(); ++t) {
                const auto token = grid.grid_token(w, t);
                const auto [down, across] = place_of(grid, token);
                CHECK(down.window * (grid.width / grid.window_width) + across.window == w);
                ++seen[static_cast<std::size_t>(token)];
                CHECK(windows.view()(grid.windows() + w, 2, t, 4) == image.view()(1, 2, token, 4));
            }
        CHECK(std::ranges::count(seen, 1) == grid.height * grid.width);
        tensor<float> back(image.shape());
        window_reverse(grid, windows.view(), back.view());
        CHECK(std::equal(back.data(), back.data() + back.shape().size(), image.data()));
    }
}

TEST_CASE("windows: any strides", "[layer]") {
    const auto& grid = grids[2];
    const index_t n = grid.height * grid.width;
    auto memory = random_tensor<float>({1, 1, 1, 2 * n * 3 * 4 * 2}, 2);
    const shape s{2, 3, n, 4};
    const tensor_view<const float> image(memory.data(), s, {n * 24, 2, 24, 6});
    tensor<float> dense(s), expected({2 * grid.windows(), 3, grid.window_tokens(), 4}), got(expected.shape());
    for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t t = 0; t < n; ++t)
                for (index_t c = 0; c < 4; ++c) dense.view()(b, h, t, c) = image(b, h, t, c);
    window_partition(grid, dense.view(), expected.view());
    window_partition(grid, image, token_major(got.data(), expected.shape()));
    const auto view = token_major(got.data(), expected.shape());
    bool same = true;
    for (index_t b = 0; b < expected.shape().batch; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t t = 0; t < grid.window_tokens(); ++t)
                for (index_t c = 0; c < 4; ++c) same &= view(b, h, t, c) == expected.view()(b, h, t, c);
    CHECK(same);
}

TEST_CASE("windows: the shift's segments are Swin's slices", "[layer]") {
    for (const auto& grid : grids) {
        const auto pattern = grid.shift_segments();
        for (index_t w = 0; w < 2 * grid.windows(); ++w) // two images
            for (index_t i = 0; i < grid.window_tokens(); ++i)
                for (index_t j = 0; j < grid.window_tokens(); ++j)
                    if (pattern.at(w, 0).visible(i, j) !=
                        (place_of(grid, grid.grid_token(w % grid.windows(), i)) == place_of(grid, grid.grid_token(w % grid.windows(), j))))
                        FAIL("window " << w << ", tokens " << i << " and " << j);
    }
}

TEST_CASE("windows: attention in shifted windows is attention over the image with a mask", "[layer]") {
    const auto& grid = grids[2];
    const shape s{2, 2, grid.height * grid.width, 7};
    const auto q = random_tensor<float>(s, 1), k = random_tensor<float>(s, 2), v = random_tensor<float>(s, 3);
    const auto in_windows =
        attend(softmax_attention{.pattern = grid.shift_segments()}, partitioned(grid, q), partitioned(grid, k), partitioned(grid, v));
    tensor<float> out(s);
    window_reverse(grid, in_windows.view(), out.view());
    const auto same_place = tiles([&](index_t i, index_t j) { return place_of(grid, i) == place_of(grid, j); }, s.tokens, s.tokens);
    const auto expected = attend(softmax_attention{.pattern = same_place}, q, k, v);
    float worst = 0;
    for (index_t e = 0; e < s.size(); ++e) worst = std::max(worst, std::abs(out.data()[e] - expected.data()[e]));
    CHECK(worst < 1e-5f);
}

TEST_CASE("windows: wrong sizes are refused by name", "[layer]") {
    const window_grid good{.height = 8, .width = 8, .window_height = 4, .window_width = 2, .shift_height = 1, .shift_width = 1};
    const auto with = [&](index_t window_grid::* member, index_t value) {
        auto grid = good;
        grid.*member = value;
        return error_of([&] { grid.shift_segments(); });
    };
    CHECK(with(&window_grid::height, 0) == "window_grid::shift_segments: grid of 0 x 8 tokens is empty");
    CHECK(with(&window_grid::window_height, 3) == "window_grid::shift_segments: window of 3 x 2 tokens does not divide the grid of 8 x 8");
    CHECK(with(&window_grid::window_width, 0) == "window_grid::shift_segments: window of 4 x 0 tokens does not divide the grid of 8 x 8");
    CHECK(with(&window_grid::shift_width, 2) ==
          "window_grid::shift_segments: shift of 1 x 2 tokens does not lie within the window of 4 x 2");
    CHECK(with(&window_grid::shift_height, -1) ==
          "window_grid::shift_segments: shift of -1 x 1 tokens does not lie within the window of 4 x 2");

    tensor<float> image({1, 2, 64, 3}), windows({8, 2, 8, 3}), other({1, 2, 60, 3}), few({4, 2, 8, 3});
    CHECK(error_of([&] { window_partition(good, image.view(), windows.view()); }) == nothing_thrown);
    CHECK_THAT(error_of([&] { window_partition(good, other.view(), windows.view()); }),
               Contains("window_partition: image has shape") && Contains("64 tokens"));
    CHECK_THAT(error_of([&] { window_partition(good, image.view(), few.view()); }), Contains("window_partition: windows has shape"));
    CHECK_THAT(error_of([&] { window_reverse(good, few.view(), image.view()); }), Contains("window_reverse: windows has shape"));
    CHECK_THAT(error_of([&] { window_partition(good, image.view(), head_major(image.data(), windows.shape())); }), Contains("overlaps image"));
    CHECK_THAT(error_of([&] { window_reverse(good, windows.view(), head_major<float>(nullptr, image.shape())); }), Contains("image has shape (1, 2, 64, 3) but no memory"));
}

} // namespace attn::testing
