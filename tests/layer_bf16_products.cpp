// Linears with bf16_products: their arithmetic, how wrong it may be, and the promises that they keep as any other.
#include "catch.hpp"
#include "errors.hpp"
#include "layer_checks.hpp"
#include "storage.hpp"

#include <attn/layer/fold.hpp>
#include <attn/norm/batch_norm.hpp>

namespace attn::testing {

namespace {

float rounded(float x) {
    if (std::abs(x) < std::numeric_limits<float>::min()) return std::copysign(0.0F, x);
    return detail::widened<narrow_format::bfloat16>(detail::narrowed<narrow_format::bfloat16>(x));
}

/// The textbook formula in float, its operands rounded.
tensor<float> textbook(const linear<float>& layer, const tensor<float>& x) {
    const auto& s = x.shape();
    tensor<float> out(layer.output_shape(s));
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t i = 0; i < s.tokens; ++i)
            for (index_t o = 0; o < layer.outputs(); ++o) {
                float sum = layer.bias.empty() ? 0 : layer.bias[static_cast<std::size_t>(o)];
                for (index_t c = 0; c < s.channels; ++c) sum += rounded(layer.weight(0, 0, o, c)) * rounded(x(b, 0, i, c));
                out(b, 0, i, o) = sum;
            }
    return out;
}

/// A layer of random weights, and another of the same whose products are not rounded.
struct pair_of_layers {
    parameters weights;
    linear<float> rounds, plain;

    pair_of_layers(index_t outputs, index_t inputs, bool has_bias = true) : plain(random_linear<float>(weights, "linear", outputs, inputs, has_bias)) {
        rounds = plain;
        rounds.products = bf16_products{};
    }
};

} // namespace

TEST_CASE("linear with bf16_products: two products are added at a time, in the order of the instruction", "[layer][portable]") {
    for (const auto& [tokens, inputs, outputs] : std::vector<std::array<index_t, 3>>{{1, 1, 1}, {5, 7, 3}, {17, 64, 65}, {9, 127, 33}, {3, 128, 130}, {2, 2, 200}}) {
        INFO(tokens << " x " << inputs << " to " << outputs);
        const pair_of_layers layers(outputs, inputs);
        const auto x = random_rows<float>({1, 1, tokens, inputs}, 3);
        const auto ours = result_of(layers.rounds, x);
        index_t different = 0;
        for (index_t i = 0; i < tokens; ++i)
            for (index_t o = 0; o < outputs; ++o) {
                const auto product = [&](index_t c) { return c < inputs ? rounded(layers.plain.weight(0, 0, o, c)) * rounded(x(0, 0, i, c)) : 0.0F; }; // exact
                float sum = 0;
                for (index_t c = 0; c < inputs; c += 2) {
                    sum = product(c + 1) + sum;
                    sum = product(c) + sum;
                }
                different += !same_bits(ours(0, 0, i, o), layers.plain.bias[static_cast<std::size_t>(o)] + sum);
            }
        CHECK(different == 0);
    }
}

TEST_CASE("linear with bf16_products: at most twice the error of the textbook formula with the same rounding", "[layer][portable]") {
    for (const auto& [batch, tokens, inputs, outputs] : std::vector<std::array<index_t, 4>>{
             {1, 1, 1, 1}, {2, 5, 7, 3}, {3, 17, 64, 65}, {1, 97, 130, 33}, {2, 0, 4, 4}, {2, 3, 0, 5}, {2, 3, 5, 0}, {1, 400, 40, 20}, {1, 3, 1031, 70}})
        for (const bool has_bias : {false, true}) {
            INFO(batch << " x " << tokens << " x " << inputs << " to " << outputs);
            const pair_of_layers layers(outputs, inputs, has_bias);
            const auto x = random_rows<float>({batch, 1, tokens, inputs}, 3);
            const auto exact = plain_linear(wide(x), layers.plain);
            CHECK(largest_error(result_of(layers.rounds, x), exact) <=
                  2 * largest_error(textbook(layers.plain, x), exact) + 16 * epsilon<float> * std::max(1.0, largest_magnitude(exact)));
            if (exact.shape().size() > 0) check_bits(layers.rounds, x);
        }
}

TEST_CASE("linear with bf16_products: a 16-bit weight is widened first, in any layout", "[layer][portable]") {
    const auto x = random_rows<float>({1, 1, 19, 131}, 3);
    for (const auto format : all_formats)
        for (const auto& where : all_layouts) {
            INFO(name_of(format) << ", " << where.name);
            stored_tensor w(random_rows<float>({1, 1, 97, 131}, 1), format, where.value);
            const linear<float> stored{.weight = w.view(), .products = bf16_products{}}, floats{.weight = w.wide, .products = bf16_products{}};
            CHECK(same_bits(result_of(stored, x), result_of(floats, x)));
            CHECK(w.guards_intact());
        }
}

TEST_CASE("bf16_products: in layers each linear has its own choice, and keeps it when a norm is folded in", "[layer][portable]") {
    const pair_of_layers up(37, 20), down(20, 37);
    const auto x = random_rows<float>({2, 1, 19, 20}, 3);
    auto hidden = result_of(up.rounds, x);
    for (index_t e = 0; e < hidden.shape().size(); ++e) hidden.data()[e] = std::max(hidden.data()[e], 0.0F);
    CHECK(same_bits(result_of(feed_forward{.up = up.rounds, .down = down.plain, .activation = relu{}}, x), result_of(down.plain, hidden)));
    CHECK(same_bits(result_of(feed_forward{.up = up.rounds, .down = down.rounds, .activation = relu{}}, x), result_of(down.rounds, hidden)));
    CHECK(!same_bits(result_of(up.rounds, x), result_of(up.plain, x)));

    const std::vector<double> mean(20, 0.3), variance(20, 1.7);
    const batch_norm<float> norm{.mean = mean, .variance = variance};
    parameters folded;
    CHECK(fold_into(norm, up.rounds, folded, "up").products.rounded());
    CHECK(!fold_into(norm, up.plain, folded, "plain").products.rounded());
    const batch_norm<float> of_half{.mean = std::span(mean).first(10), .variance = std::span(variance).first(10)};
    const window_grid grid{.height = 2, .width = 2, .window_height = 1, .window_width = 2};
    CHECK(fold_into(of_half, spatial_reduction<float>{grid, up.rounds}, folded, "reduce").projection.products.rounded());
}

TEST_CASE("linear with bf16_products: has no gradient", "[layer]") {
    const pair_of_layers layers(6, 4);
    const auto x = random_rows<float>({2, 1, 3, 4}, 3), given = random_rows<float>({2, 1, 3, 6}, 4);
    tensor<float> to(x.shape());
    const workspace none;
    check_says(error_of([&] { backward(layers.rounds, {.tokens = x}, none, given, {.tokens = to}); }), {"linear: products ", "no gradient"});
    CHECK(error_of([&] { backward(layers.plain, {.tokens = x}, none, given, {.tokens = to}); }) == nothing_thrown);
}

TEST_CASE("linear: products are deduced around", "[layer][deduction]") {
    const tensor<float> matrix({1, 1, 8, 8});
    const tensor<double> of_double({1, 1, 8, 8});
    STATIC_REQUIRE(std::same_as<decltype(linear{.weight = matrix, .products = bf16_products{}}), linear<float>>);
    STATIC_REQUIRE(std::same_as<decltype(linear{.weight = of_double, .products = unrounded_products{}}), linear<double>>);
}

} // namespace attn::testing
