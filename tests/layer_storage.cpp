// Layers whose weights are stored in 16 bits: they compute what they would with the widened weights.
#include "catch.hpp"
#include "errors.hpp"
#include "layer_checks.hpp"
#include "storage.hpp"

#include <attn/layer/fold.hpp>
#include <attn/norm/batch_norm.hpp>
#include <attn/norm/layer_norm.hpp>

#include <Eigen/Core>

namespace attn::testing {

namespace {

/// Small numbers, some of them subnormal ones of half.
stored_tensor weight_of(index_t outputs, index_t inputs, narrow_format format, layout where) {
    auto w = random_rows<float>({1, 1, outputs, inputs}, 1, 0, 0.3);
    for (index_t e = 3; e < w.shape().size(); e += 7) w.data()[e] *= 0x1p-16F;
    return {std::move(w), format, where};
}

struct of_linear {
    tensor<float> out, tokens, weight;
    std::vector<float> bias;

    of_linear(const linear<float>& layer, const tensor<float>& x, const tensor<float>& given, auto& executor)
        : out(given.shape()), tokens(x.shape()), weight(layer.weight.shape()), bias(static_cast<std::size_t>(layer.outputs())) {
        forward(layer, {.tokens = x}, out.view(), executor);
        backward(layer, {.tokens = x}, workspace(), given, {.tokens = tokens, .parameters = {weight, bias}}, executor);
    }
    friend bool same_bits(const of_linear& a, const of_linear& b) {
        return testing::same_bits(a.out, b.out) && testing::same_bits(a.tokens, b.tokens) && testing::same_bits(a.weight, b.weight) && a.bias == b.bias;
    }
};

} // namespace

TEST_CASE("linear: a 16-bit weight is widened first, in any layout, and so it is for gradients", "[layer][portable]") {
    sequential here;
    thread_pool pool(3);
    for (const auto& [tokens, inputs, outputs] :
         std::vector<std::array<index_t, 3>>{{1, 1, 1}, {1, 130, 97}, {5, 7, 3}, {17, 64, 65}, {9, 131, 33}, {0, 4, 4}, {3, 0, 5}, {3, 5, 0}, {400, 40, 20}, {2, 300, 530}}) {
        const auto x = random_rows<float>({2, 1, tokens, inputs}, 3), given = random_rows<float>({2, 1, tokens, outputs}, 4);
        const auto bias = random_rows<float>({1, 1, 1, outputs}, 5);
        for (const auto format : {narrow_format::bfloat16, narrow_format::half})
            for (const auto& where : all_layouts) {
                INFO(tokens << " x " << inputs << " to " << outputs << ", " << name_of(format) << ", " << where.name);
                auto w = weight_of(outputs, inputs, format, where.value);
                linear<float> stored{.weight = w.view(), .bias = {bias.data(), static_cast<std::size_t>(outputs)}}, wide = stored;
                wide.weight = w.wide;
                const of_linear expected(wide, x, given, here);
                CHECK(same_bits(of_linear(stored, x, given, here), expected));
                CHECK(same_bits(of_linear(stored, x, given, pool), expected));
                CHECK(same_bits(forward(stored, {.tokens = x, .residual = given}), forward(wide, {.tokens = x, .residual = given})));
                CHECK(w.guards_intact());
            }
    }
}

TEMPLATE_TEST_CASE("linear: of a tensor of 16-bit numbers computes in float, also within layers", "[layer][deduction]", Eigen::bfloat16, Eigen::half) {
    const auto stored = [](index_t outputs, index_t inputs, unsigned seed) {
        const auto w = random_rows<float>({1, 1, outputs, inputs}, seed, 0, 0.3);
        tensor<TestType> t(w.shape());
        for (index_t e = 0; e < w.shape().size(); ++e) t.data()[e] = static_cast<TestType>(w.data()[e]);
        return t;
    };
    const auto up = stored(37, 20, 1), down = stored(20, 37, 2), square = stored(20, 20, 3);
    STATIC_REQUIRE(std::same_as<decltype(linear{.weight = up}), linear<float>>);
    STATIC_REQUIRE(std::same_as<decltype(linear{up.view()}), linear<float>>);
    STATIC_REQUIRE(std::same_as<decltype(linear{stored_view<const float>(up)}), linear<float>>);
    STATIC_REQUIRE(std::same_as<decltype(linear{linear{up}}), linear<float>>);

    const auto layers = [](const auto& u, const auto& d, const auto& s) {
        return transformer_block{.attention_norm = layer_norm<float>{},
                                 .attention = multi_head{.heads = 4, .q = linear{s}, .k = linear{s}, .v = linear{s}, .out = linear{s}},
                                 .feed_forward_norm = layer_norm<float>{},
                                 .feed_forward = feed_forward{.up = linear{u}, .down = linear{d}, .gate = linear{u}, .activation = silu{}}};
    };
    const auto widened = [](const tensor<TestType>& t) {
        tensor<float> wide(t.shape());
        for (index_t e = 0; e < t.shape().size(); ++e) wide.data()[e] = static_cast<float>(t.data()[e]);
        return wide;
    };
    const auto wide_up = widened(up), wide_down = widened(down), wide_square = widened(square);
    const auto x = random_rows<float>({2, 1, 19, 20}, 3);
    CHECK(same_bits(result_of(layers(up, down, square), x), result_of(layers(wide_up, wide_down, wide_square), x)));
}

TEST_CASE("fold: a linear whose weight is stored in 16 bits becomes one of floats", "[layer][norm]") {
    const auto weight = random_numbers<float>(12, 1), bias = random_numbers<float>(12, 2);
    const std::vector<double> mean(12, 0.3), variance(12, 1.7);
    const batch_norm<float> norm{.weight = weight, .bias = bias, .mean = mean, .variance = variance};
    auto w = weight_of(9, 12, narrow_format::half, layout::padded_rows);
    const linear<float> stored{w.view()}, wide{w.wide};
    parameters folded;
    const auto ours = fold_into(norm, stored, folded, "stored"), expected = fold_into(norm, wide, folded, "wide");
    CHECK(!ours.weight.is_narrow());
    const auto x = random_rows<float>({1, 1, 7, 12}, 3);
    CHECK(same_bits(result_of(ours, x), result_of(expected, x)));
    const window_grid grid{.height = 2, .width = 2, .window_height = 1, .window_width = 2};
    const batch_norm<float> of_half{.mean = std::span(mean).first(6), .variance = std::span(variance).first(6)};
    const auto reduced = [&](const linear<float>& l, const std::string& name) {
        return fold_into(of_half, spatial_reduction<float>{grid, l}, folded, name).projection;
    };
    CHECK(same_bits(result_of(reduced(stored, "stored.reduce"), x), result_of(reduced(wide, "wide.reduce"), x)));

    // A folded weight that is stored so too is rounded; the deviation is of what is stored.
    auto to = weight_of(9, 12, narrow_format::bfloat16, layout::column_major);
    tensor<float> exact(w.wide.shape());
    std::vector<float> offset(9);
    CHECK(fold(norm, stored.view(), {exact, offset}, x) < 1e-5);
    CHECK(fold(norm, stored.view(), {to.view(), offset}, x) > 1e-3);
    CHECK(to.holds(exact));
    CHECK(to.guards_intact());
}

TEST_CASE("linear: memory of a 16-bit weight is not written to", "[layer]") {
    auto w = weight_of(8, 8, narrow_format::half, layout::head_major);
    const linear<float> layer{w.view()};
    const tensor_view<float> on_weight(static_cast<float*>(w.view().data()), {1, 1, 4, 8}, {0, 0, 8, 1});
    const auto x = random_rows<float>({1, 1, 4, 8}, 3);
    check_says(error_of([&] { forward(layer, {.tokens = x}, on_weight); }), {"linear: out ", "overlaps the weight of a linear"});
    linear<float> flat = layer;
    flat.weight = stored_view<const float>(w.view().data(), narrow_format::half, {1, 2, 4, 8}, {0, 32, 8, 1});
    check_says(error_of([&] { (void)forward(flat, {.tokens = x}); }), {"linear: weight ", "(1, 2, 4, 8)", "not a matrix"});
    std::vector<float> bias(8);
    const std::vector<double> mean(8), variance(8, 1.0);
    const batch_norm<float> norm{.mean = mean, .variance = variance};
    check_says(error_of([&] { fold(norm, layer.view(), linear_view<float>{tensor_view<float>(on_weight.data(), {1, 1, 8, 8}, w.view().strides()), bias}); }),
               {"fold: folded.weight ", "overlaps linear.weight"});
}

} // namespace attn::testing
