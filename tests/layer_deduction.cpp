// Scalar types that a user need not write.
#include "catch.hpp"

#include <attn/attn.hpp>
#include <attn/layer/transformer_block.hpp>

#include <vector>

namespace attn::testing {

namespace {

template <class Expected>
void check_is(const auto& made) {
    STATIC_REQUIRE(std::same_as<std::remove_cvref_t<decltype(made)>, Expected>);
}

TEMPLATE_TEST_CASE("class templates deduce their scalar type from tensors, views and vectors", "[deduction]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    tensor<T> matrix({1, 1, 8, 8}), kernel({8, 1, 3, 3}); // not const: their views are of what can be written
    const tensor<T>& constant = matrix;
    const std::vector<T> numbers(8);
    const std::vector<double> moments(8, 1.0);

    check_is<depthwise_convolution<T>>(depthwise_convolution{.weights = kernel, .height = 2, .width = 4});
    check_is<depthwise_convolution<T>>(depthwise_convolution{.weights = kernel.view(), .bias = numbers});
    const tensor<T> conv1d({1, 8, 1, 4});
    check_is<causal_convolution<T>>(causal_convolution{.weights = conv1d, .first_state = matrix});
    check_is<causal_convolution<T, silu>>(causal_convolution{.weights = conv1d.view(), .bias = numbers, .activation = silu{}, .last_state = matrix});
    check_is<linear_projection<T>>(linear_projection{.matrix = constant});
    check_is<channel_convolution<T>>(channel_convolution{.weights = matrix.view(), .bias = matrix});
    check_is<mixing_convolution<T>>(mixing_convolution{.weights = matrix});
    check_is<additive_bias<T>>(additive_bias{matrix});
    check_is<additive_bias<T>>(additive_bias{.bias = constant.view(), .first_query = 3});
    check_is<layer_norm<T>>(layer_norm{.weight = numbers, .bias = numbers});
    check_is<rms_norm<T>>(rms_norm{.weight = std::span(numbers), .eps = 1e-6});
    check_is<dynamic_tanh<T>>(dynamic_tanh{.weight = numbers, .alpha = 0.7});
    check_is<dynamic_erf<T>>(dynamic_erf{.weight = numbers, .bias = numbers, .shift = 0.1});
    check_is<batch_norm<T>>(batch_norm{.weight = numbers, .bias = numbers, .mean = moments, .variance = moments});

    const linear by_matrix{.weight = matrix, .bias = numbers};
    check_is<linear<T>>(by_matrix);
    check_is<linear<T>>(linear{by_matrix});
    const multi_head plain{.heads = 2, .q = by_matrix, .k = by_matrix, .v = by_matrix, .out = by_matrix};
    check_is<multi_head<T>>(plain);
    const feed_forward mlp{.up = by_matrix, .down = by_matrix, .activation = silu{}};
    check_is<feed_forward<T, silu>>(mlp);
    const layer_norm norm{.weight = numbers};
    check_is<transformer_block<layer_norm<T>, multi_head<T>, feed_forward<T, silu>>>(
        transformer_block{.attention_norm = norm, .attention = plain, .feed_forward_norm = norm, .feed_forward = mlp});
    check_is<linformer_attention<linear_projection<T>>>(linformer_attention{.key_projection = linear_projection{.matrix = matrix}});
}

TEST_CASE("a layer deduces the operator it is around", "[deduction]") {
    const tensor<float> matrix({1, 1, 8, 8}), kernel({4, 1, 3, 3});
    const linear by_matrix{.weight = matrix};
    const simplified_linear_attention attention{.convolution = depthwise_convolution{.weights = kernel, .height = 2, .width = 4}, .pattern = causal{}};
    check_is<simplified_linear_attention<causal>>(attention);
    check_is<multi_head<float, simplified_linear_attention<causal>>>(
        multi_head{.heads = 2, .q = by_matrix, .k = by_matrix, .v = by_matrix, .out = by_matrix, .attention = attention});
}

} // namespace

} // namespace attn::testing
