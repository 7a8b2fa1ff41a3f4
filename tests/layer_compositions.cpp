// The blocks of published models, made of the library's parts: each against its formulas in double.
#include "block_checks.hpp"
#include "errors.hpp"

#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/reference/depthwise_convolution.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/linformer.hpp>
#include <attn/reference/talking_heads.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

namespace {

using progressive = progressive_rep_batch_norm<layer_norm<float>>;
constexpr index_t channels = 24, heads = 3;

/// Of an attention on q, k and v, heads first.
tensor<double> no_result(const tensor<double>& q, const tensor<double>& v) {
    return tensor<double>({q.shape().batch, q.shape().heads, q.shape().tokens, v.shape().channels});
}

/// relu(q) (relu(k)^T v) / (...) + DWC of the values, or of other tokens, on a grid.
auto plain_simplified(const depthwise_convolution<float>& convolution) {
    return [=](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
        auto out = no_result(q, v);
        reference::linear_attention<double>(inputs<double>{q, k, v}, {out.view()}, relu{}, dense{}, true, 1e-6, 1);
        const auto& w = convolution.weights.shape();
        reference::add_depthwise_convolution<double, float>(v.view(), out.view(),
                                                            {convolution.height, convolution.width, w.tokens / 2, w.channels / 2},
                                                            convolution.weights, convolution.bias);
        return out;
    };
}
depthwise_convolution<float> random_convolution(parameters& weights, index_t d, index_t height, index_t width) {
    return {.weights = add_random<float>(weights, "dwc.weight", {1, d, 5, 5}, 5, 0.2),
            .bias = random_vector(weights, "dwc.bias", d),
            .height = height,
            .width = width};
}

/// The block and its folded form against the formula; attention(tokens) is the formula of its attention layer.
template <class Block, class F>
void check_folded(const Block& block, const tensor<float>& x, const random_statistics& first, const random_statistics& second,
                  const F& attention) {
    parameters folded;
    const auto exact = plain_block(wide(x), first.formula(), attention, second.formula(),
                                   [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); });
    CHECK(close(result_of(block, x), exact));
    const auto fast = fold(block, folded);
    CHECK(close(result_of(fast, x), exact));
    sequential here;
    thread_pool pool(3);
    CHECK(same_bits(result_on(fast, {.tokens = x}, here), result_on(fast, {.tokens = x}, pool)));
}

} // namespace

TEST_CASE("SLAB's DeiT block: simplified linear attention, PRepBN, folded", "[layer]") {
    parameters weights;
    const random_statistics first(weights, "norm1", channels), second(weights, "norm2", channels);
    const auto convolution = random_convolution(weights, 8, 5, 7);
    const auto attention = random_multi_head<float>(weights, "attention", channels, heads, heads, 8, 8,
                                                    simplified_linear_attention<>{.convolution = convolution});
    const transformer_block<progressive, std::remove_cvref_t<decltype(attention)>, feed_forward<float>> block{
        .attention_norm = {{}, first.norm()},
        .attention = attention,
        .feed_forward_norm = {{}, second.norm()},
        .feed_forward = random_feed_forward(weights, "mlp", channels, 96)};
    check_folded(block, random_rows<float>({2, 1, 35, channels}, 3), first, second,
                 [&](const auto& t) { return plain_multi_head(t, attention, plain_simplified(convolution)); });
}

TEST_CASE("Swin's blocks: shifted windows with a relative bias, and SLAB's, folded", "[layer]") {
    parameters weights;
    const random_statistics first(weights, "norm1", channels), second(weights, "norm2", channels);
    const auto x = random_rows<float>({2, 1, 8 * 12, channels}, 3);
    const auto mlp = random_feed_forward(weights, "mlp", channels, 96);
    const window_grid grid{.height = 8, .width = 12, .window_height = 4, .window_width = 4, .shift_height = 2, .shift_width = 1};
    // The formula's windows: tokens gathered one by one.
    const auto in_windows = [](const window_grid& g, const tensor<double>& t, const auto& layer) {
        tensor<double> windows({t.shape().batch * g.windows(), 1, g.window_tokens(), channels}), back(t.shape());
        window_partition(g, t.view(), windows.view());
        const auto computed = layer(windows);
        window_reverse(g, computed.view(), back.view());
        return back;
    };

    const auto bias =
        add_random<float>(weights, "relative_bias", {heads, 16, 16}, 7); // a row of the table for each pair of a window's tokens
    const softmax_attention<segments, additive_bias<float>> shifted{.score = {bias}, .pattern = grid.shift_segments()};
    const auto attention = random_multi_head<float>(weights, "attention", channels, heads, heads, 8, 8, shifted);
    const transformer_block<rep_batch_norm<float>, windowed<std::remove_cvref_t<decltype(attention)>>, feed_forward<float>> swin{
        .attention_norm = first.norm(), .attention = {grid, attention}, .feed_forward_norm = second.norm(), .feed_forward = mlp};
    check_folded(swin, x, first, second, [&](const tensor<double>& t) {
        return in_windows(grid, t, [&](const auto& windows) {
            return plain_multi_head(windows, attention, [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
                auto out = no_result(q, v);
                reference::softmax<double>(inputs<double>{q, k, v}, {out.view()}, {}, additive_bias<float>{bias}, grid.shift_segments());
                return out;
            });
        });
    });

    auto unshifted = grid;
    unshifted.shift_height = unshifted.shift_width = 0;
    const auto convolution = random_convolution(weights, 8, 4, 4);
    const auto simplified = random_multi_head<float>(weights, "simplified", channels, heads, heads, 8, 8,
                                                     simplified_linear_attention<>{.convolution = convolution});
    const transformer_block<rep_batch_norm<float>, windowed<std::remove_cvref_t<decltype(simplified)>>, feed_forward<float>> slab{
        .attention_norm = first.norm(), .attention = {unshifted, simplified}, .feed_forward_norm = second.norm(), .feed_forward = mlp};
    check_folded(slab, x, first, second, [&](const tensor<double>& t) {
        return in_windows(unshifted, t,
                          [&](const auto& windows) { return plain_multi_head(windows, simplified, plain_simplified(convolution)); });
    });
}

TEST_CASE("windowed: attention that would join opposite edges of a shifted grid is refused", "[layer]") {
    parameters weights;
    const auto x = random_rows<float>({2, 1, 8 * 12, channels}, 3);
    const window_grid grid{.height = 8, .width = 12, .window_height = 4, .window_width = 4, .shift_height = 2, .shift_width = 1};
    const auto mlp = random_feed_forward(weights, "mlp", channels, 96);
    int number = 0;
    const auto heads_of = [&](const auto& op) { return random_multi_head<float>(weights, std::to_string(++number), channels, heads, heads, 8, 8, op); };
    const auto problem_of = [&](const window_grid& g, const auto& layer) {
        return error_of([&] { (void)forward(windowed<std::remove_cvref_t<decltype(layer)>>{g, layer}, {.tokens = x}); });
    };
    const auto attention_of = [&](const auto& op) { return problem_of(grid, heads_of(op)); };
    CHECK(attention_of(softmax_attention<>{}) == "windowed: layer shows token 3 of window 2 to token 2, but the shift of 2 x 1 took them from opposite edges of "
                                                 "the grid: its attention needs the pattern grid.shift_segments()");
    const auto refused = [](const std::string& problem) { return problem.find("grid.shift_segments()") != std::string::npos; };
    auto rows = grid, columns = grid, none = grid;
    columns.shift_height = rows.shift_width = none.shift_height = none.shift_width = 0;
    CHECK(refused(problem_of(rows, heads_of(softmax_attention<>{}))));
    CHECK(problem_of(none, heads_of(softmax_attention<>{})) == nothing_thrown);
    CHECK(refused(attention_of(softmax_attention{.pattern = causal{}})));
    CHECK(refused(problem_of(rows, heads_of(softmax_attention{.pattern = pattern::local{1}}))));
    CHECK(refused(problem_of(rows, heads_of(softmax_attention{.pattern = columns.shift_segments()}))));
    CHECK(refused(problem_of(columns, heads_of(softmax_attention{.pattern = rows.shift_segments()}))));
    CHECK(refused(attention_of(softmax_attention{.pattern = grid.shift_segments() | pattern::on_heads{heads - 1, heads}})));
    CHECK(refused(attention_of(simplified_linear_attention<>{})));
    CHECK(refused(attention_of(talking_heads_attention<>{})));
    const auto attention = heads_of(softmax_attention<>{});
    CHECK(refused(problem_of(grid, transformer_block<identity_norm<float>, std::remove_cvref_t<decltype(attention)>, feed_forward<float>>{
                                       .attention = attention, .feed_forward = mlp})));

    CHECK(problem_of(grid, mlp) == nothing_thrown);
    CHECK(attention_of(softmax_attention{.pattern = grid.shift_segments()}) == nothing_thrown);
    CHECK(attention_of(softmax_attention{.pattern = causal{} & grid.shift_segments()}) == nothing_thrown);
    CHECK(attention_of(talking_heads_attention<segments>{.pattern = grid.shift_segments()}) == nothing_thrown);
    tensor<float> bias({grid.windows(), 1, 16, 16});
    const auto kept = grid.shift_segments();
    for (index_t w = 0; w < grid.windows(); ++w)
        for (index_t i = 0; i < 16; ++i)
            for (index_t j = 0; j < 16; ++j) bias(w, 0, i, j) = kept.at(w, 0).visible(i, j) ? 0 : -std::numeric_limits<float>::infinity();
    CHECK(attention_of(softmax_attention{.score = additive_bias{bias}}) == nothing_thrown);
    bias(5, 0, 8, 4) = -100; // the code that papers come with hides by that, and not quite
    CHECK(refused(attention_of(softmax_attention{.score = additive_bias{bias}})));
}

TEST_CASE("PVT's block: keys and values of a reduced grid, folded through the reduction", "[layer]") {
    parameters weights;
    const random_statistics first(weights, "norm1", channels), second(weights, "norm2", channels);
    const window_grid grid{.height = 6, .width = 8, .window_height = 2, .window_width = 2};
    const auto norm = random_layer_norm(weights, "reduction.norm", channels);
    const auto plain = random_multi_head<float>(weights, "attention", channels, heads, heads, 8, 8);
    const multi_head<float, softmax_attention<>, spatial_reduction<float, layer_norm<float>>> attention{
        .heads = heads,
        .q = plain.q,
        .k = plain.k,
        .v = plain.v,
        .out = plain.out,
        .reduce = {.grid = grid, .projection = random_linear<float>(weights, "reduction", channels, 4 * channels), .norm = norm}};
    const transformer_block<rep_batch_norm<float>, std::remove_cvref_t<decltype(attention)>, feed_forward<float>> block{
        .attention_norm = first.norm(),
        .attention = attention,
        .feed_forward_norm = second.norm(),
        .feed_forward = random_feed_forward(weights, "mlp", channels, 96)};
    check_folded(block, random_rows<float>({2, 1, 48, channels}, 3), first, second, [&](const tensor<double>& t) {
        // A convolution of stride 2: token (y, x) of the reduced grid reads (2y, 2x) .. (2y + 1, 2x + 1).
        tensor<double> reduced({2, 1, 12, channels});
        for (index_t b = 0; b < 2; ++b)
            for (index_t token = 0; token < 12; ++token)
                for (index_t o = 0; o < channels; ++o) {
                    double sum = static_cast<double>(attention.reduce.projection.bias[static_cast<std::size_t>(o)]);
                    for (index_t tap = 0; tap < 4; ++tap)
                        for (index_t c = 0; c < channels; ++c)
                            sum += static_cast<double>(attention.reduce.projection.weight(0, 0, o, tap * channels + c)) *
                                   t(b, 0, (token / 4 * 2 + tap / 2) * 8 + token % 4 * 2 + tap % 2, c);
                    reduced(b, 0, token, o) = sum;
                }
        return plain_multi_head(t, plain_layer_norm(norm)(reduced), attention, plain_softmax(), [](auto&, index_t) {});
    });
}

TEST_CASE("CaiT's block: talking heads, and its layer scale in the last linear", "[layer]") {
    parameters weights;
    const auto mix = [&](const std::string& name, unsigned seed) { return add_random<double>(weights, name, {heads, heads}, seed); };
    const auto bias = random_numbers<double>(heads, 4), bias2 = random_numbers<double>(heads, 5);
    const talking_heads_attention<> talking{
        .logits_mix = mix("proj_l", 1), .logits_bias = bias, .weights_mix = mix("proj_w", 2), .weights_bias = bias2};
    const auto unscaled = random_multi_head<float>(weights, "attention", channels, heads, heads, 8, 8, talking);
    const auto gamma = random_vector(weights, "gamma", channels, 0.1);
    // diag(gamma) (W x + b).
    auto attention = unscaled;
    const auto scaled = weights.add<float>("scaled.weight", {channels, channels}),
               scaled_bias = weights.add<float>("scaled.bias", {channels});
    for (index_t o = 0; o < channels; ++o) {
        const auto at = static_cast<std::size_t>(o);
        for (index_t c = 0; c < channels; ++c) scaled(0, 0, o, c) = gamma[at] * unscaled.out.weight(0, 0, o, c);
        scaled_bias(0, 0, 0, o) = gamma[at] * unscaled.out.bias[at];
    }
    attention.out = weights.get_linear<float>("scaled", channels, channels);
    const transformer_block<layer_norm<float>, std::remove_cvref_t<decltype(attention)>, feed_forward<float>> block{
        .attention_norm = random_layer_norm(weights, "norm1", channels),
        .attention = attention,
        .feed_forward_norm = random_layer_norm(weights, "norm2", channels),
        .feed_forward = random_feed_forward(weights, "mlp", channels, 96)};
    const auto x = random_rows<float>({2, 1, 29, channels}, 3);
    CHECK(close(result_of(block, x),
                plain_block(
                    wide(x), plain_layer_norm(block.attention_norm),
                    [&](const tensor<double>& t) {
                        auto y =
                            plain_multi_head(t, unscaled, [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
                                auto out = no_result(q, v);
                                reference::talking_heads<double>(inputs<double>{q, k, v}, {out.view()}, talking.logits_mix, bias,
                                                                 talking.weights_mix, bias2);
                                return out;
                            });
                        for (index_t e = 0; e < y.shape().size(); ++e)
                            y.data()[e] *= static_cast<double>(gamma[static_cast<std::size_t>(e % channels)]);
                        return y;
                    },
                    plain_layer_norm(block.feed_forward_norm),
                    [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); })));
}

TEST_CASE("A Linformer encoder: two blocks that share one projection", "[layer]") {
    parameters weights;
    const auto shared = add_random<float>(weights, "E", {9, 40}, 6, 0.2);
    const linear_projection<float> e{shared};
    auto x = random_rows<float>({2, 1, 37, channels}, 3); // shorter than E was made for
    auto exact = wide(x);
    for (const std::string name : {"first", "second"}) {
        const linformer_attention<linear_projection<float>> linformer{e};
        const auto attention = random_multi_head<float>(weights, name + ".attention", channels, heads, heads, 8, 8, linformer);
        const transformer_block<layer_norm<float>, std::remove_cvref_t<decltype(attention)>, feed_forward<float, relu>> block{
            .attention_norm = random_layer_norm(weights, name + ".norm1", channels),
            .attention = attention,
            .feed_forward_norm = random_layer_norm(weights, name + ".norm2", channels),
            .feed_forward = {.up = random_linear<float>(weights, name + ".up", 50, channels),
                             .down = random_linear<float>(weights, name + ".down", channels, 50)}};
        CHECK(block.attention.attention.key_projection.matrix.data() == shared.data());
        exact = plain_block(
            exact, plain_layer_norm(block.attention_norm),
            [&](const tensor<double>& t) {
                return plain_multi_head(t, attention, [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
                    auto out = no_result(q, v);
                    const auto project = [&](const reference::tokens<double>& rows) {
                        return reference::linear_projection<double, float>(rows, shared, tensor_view<const float>{});
                    };
                    reference::linformer<double>(inputs<double>{q, k, v}, {out.view()}, project, project);
                    return out;
                });
            },
            plain_layer_norm(block.feed_forward_norm),
            [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_relu); });
        x = result_of(block, x);
    }
    CHECK(close(x, exact));
}

} // namespace attn::testing
