// Transformer blocks, whole: the plain one, Llama's, one of large keys, and what folding does to them; each against its formula in double.
#include "allocations.hpp"
#include "block_checks.hpp"
#include "catch.hpp"

#include <attn/norm/rms_norm.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

namespace {

constexpr index_t block_channels = 48;

/// A block of four heads, with layer norms.
transformer_block<layer_norm<float>, multi_head<float>, feed_forward<float>> random_block(parameters& weights) {
    return {.attention_norm = random_layer_norm(weights, "norm1", block_channels),
            .attention = random_multi_head<float>(weights, "attention", block_channels, 4, 4, 12, 12),
            .feed_forward_norm = random_layer_norm(weights, "norm2", block_channels),
            .feed_forward = random_feed_forward(weights, "mlp", block_channels, 4 * block_channels)};
}

} // namespace

TEST_CASE("transformer_block: the plain one, on every executor, in place, beside any batch entry", "[layer]") {
    parameters weights;
    const auto block = random_block(weights);
    const auto x = random_rows<float>({3, 1, 37, block_channels}, 3);
    const auto exact = plain_block(
        wide(x), plain_layer_norm(block.attention_norm),
        [&](const auto& t) { return plain_multi_head(t, block.attention, plain_softmax()); }, plain_layer_norm(block.feed_forward_norm),
        [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); });
    CHECK(close(result_of(block, x), exact));
    check_bits(block, x, false);

    // A context is not normalised: keys and values of an encoder.
    const auto y = random_rows<float>({3, 1, 11, block_channels}, 4);
    const auto crossed = plain_block(
        wide(x), plain_layer_norm(block.attention_norm),
        [&](const auto& t) { return plain_multi_head(t, wide(y), block.attention, plain_softmax(), [](auto&, index_t) {}); },
        plain_layer_norm(block.feed_forward_norm), [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); });
    CHECK(close(forward(block, {.tokens = x, .context = y}), crossed));
}

TEST_CASE("transformer_block: BERT's, its norms behind the sums, on every executor, in place, with a context", "[layer]") {
    parameters weights;
    auto block = random_block(weights);
    block.post_norm = true;
    const auto x = random_rows<float>({3, 1, 37, block_channels}, 3), y = random_rows<float>({3, 1, 11, block_channels}, 4);
    const auto mlp = [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); };
    const auto alone = [&](const auto& t) { return plain_multi_head(t, block.attention, plain_softmax()); };
    const auto crossed = [&](const auto& t) { return plain_multi_head(t, wide(y), block.attention, plain_softmax(), [](auto&, index_t) {}); };
    const auto norm1 = plain_layer_norm(block.attention_norm), norm2 = plain_layer_norm(block.feed_forward_norm);
    CHECK(close(result_of(block, x), plain_post_norm_block(wide(x), norm1, alone, norm2, mlp)));
    check_bits(block, x, false);
    CHECK(close(forward(block, {.tokens = x, .context = y}), plain_post_norm_block(wide(x), norm1, crossed, norm2, mlp)));

    // Without norms there is nothing that could come behind.
    transformer_block<identity_norm<float>, multi_head<float>, feed_forward<float>> bare{.attention = block.attention, .feed_forward = block.feed_forward};
    const auto plain = result_of(bare, x);
    bare.post_norm = true;
    CHECK(same_bits(result_of(bare, x), plain));
}

TEST_CASE("transformer_block: Llama's, at once and in chunks of positions", "[layer]") {
    parameters weights;
    const index_t channels = 64;
    const rotary<float> turns(50, 16);
    auto attention = random_multi_head<float>(weights, "attention", channels, 4, 2, 16, 16, softmax_attention{.pattern = causal{}}, false);
    attention.rotation = &turns;
    const feed_forward<float, silu> swiglu{.up = random_linear<float>(weights, "up", 172, channels, false),
                                           .down = random_linear<float>(weights, "down", channels, 172, false),
                                           .gate = random_linear<float>(weights, "gate", 172, channels, false)};
    const auto norm1 = random_vector(weights, "norm1", channels), norm2 = random_vector(weights, "norm2", channels);
    const transformer_block<rms_norm<float>, decltype(attention), decltype(swiglu)> block{
        .attention_norm = {norm1, 1e-6}, .attention = attention, .feed_forward_norm = {norm2, 1e-6}, .feed_forward = swiglu};
    const auto x = random_rows<float>({2, 1, 33, channels}, 3);
    const auto norm_by = [](std::span<const float> weight) {
        return [weight](const tensor<double>& t) {
            tensor<double> y(t.shape());
            const std::vector<double> w(weight.begin(), weight.end());
            reference::rms_norm<double>(t.view(), y.view(), w, 1e-6);
            return y;
        };
    };
    const auto exact = [&](const positions& where) {
        const auto turn = [](auto& t, index_t first) { plain_rotary(t, 16, false, first); };
        return plain_block(
            wide(x), norm_by(norm1),
            [&](const auto& t) { return plain_multi_head(t, t, attention, plain_softmax(causal{}, where), turn, where); }, norm_by(norm2),
            [&](const auto& t) { return plain_feed_forward(t, swiglu, plain_silu); });
    };
    const auto whole = result_of(block, x);
    CHECK(close(whole, exact({})));
    CHECK(close(forward(block, {.tokens = x, .positions = {.first_query = 17, .first_key = 17}}), exact({17, 17})));
    // What the first tokens become does not depend on later ones.
    const auto beginning = forward(block, {.tokens = x.slice({.tokens = {0, 20}})});
    double worst = 0;
    for (index_t i = 0; i < 20; ++i)
        for (index_t c = 0; c < channels; ++c)
            worst = std::max(worst, static_cast<double>(std::abs(beginning(1, 0, i, c) - whole(1, 0, i, c))));
    CHECK(worst <= 32 * epsilon<float>);
}

TEST_CASE("transformer_block: many heads of large keys, free of the model's size", "[layer]") {
    parameters weights;
    const index_t channels = 512;
    const transformer_block<layer_norm<float>, multi_head<float>, feed_forward<float>> block{
        .attention = random_multi_head<float>(weights, "attention", channels, 32, 32, 128, 16),
        .feed_forward = random_feed_forward(weights, "mlp", channels, 64)};
    const auto x = random_rows<float>({1, 1, 5, channels}, 3);
    const auto norm = plain_layer_norm(block.attention_norm);
    CHECK(block.attention.q.outputs() == 32 * 128);
    CHECK(
        close(result_of(block, x), plain_block(
                                       wide(x), norm, [&](const auto& t) { return plain_multi_head(t, block.attention, plain_softmax()); },
                                       norm, [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); })));
}

TEST_CASE("fold: a block without its norms is the same block", "[layer]") {
    parameters weights, folded;
    const index_t channels = 24;
    const random_statistics first(weights, "norm1", channels), second(weights, "norm2", channels);
    auto attention = random_multi_head<float>(weights, "attention", channels, 3, 1, 8, 8, {}, false);
    attention.gate = random_linear<float>(weights, "output gate", 3, channels, false);
    const transformer_block<rep_batch_norm<float>, multi_head<float>, feed_forward<float>> block{
        .attention_norm = first.norm(),
        .attention = attention,
        .feed_forward_norm = second.norm(),
        .feed_forward = {.up = random_linear<float>(weights, "up", 50, channels),
                         .down = random_linear<float>(weights, "down", channels, 50),
                         .gate = random_linear<float>(weights, "gate", 50, channels)}};
    const auto fast = fold(block, folded, "b");
    const auto x = random_rows<float>({2, 1, 29, channels}, 3);
    const auto exact = plain_block(
        wide(x), first.formula(), [&](const auto& t) { return plain_multi_head(t, block.attention, plain_softmax()); }, second.formula(),
        [&](const auto& t) { return plain_feed_forward(t, block.feed_forward, plain_gelu); });
    CHECK(close(result_of(block, x), exact));
    CHECK(close(result_of(fast, x), exact));
    check_bits(fast, x, false);
    CHECK(folded.names() == std::vector<std::string>{"b.attention.gate.bias", "b.attention.gate.weight", "b.attention.k.bias", "b.attention.k.weight", "b.attention.q.bias",
                                                     "b.attention.q.weight", "b.attention.v.bias", "b.attention.v.weight",
                                                     "b.feed_forward.gate.bias", "b.feed_forward.gate.weight", "b.feed_forward.up.bias",
                                                     "b.feed_forward.up.weight"});
    CHECK(fast.feed_forward.down.weight.data() == block.feed_forward.down.weight.data());
    CHECK_THROWS_AS(fold(block, folded, "b"), parameter_error);
    auto behind = block;
    behind.post_norm = true;
    CHECK(error_of<argument_error>([&] { fold(behind, folded, "d"); }) == "fold: post_norm is true, but only norms in front of linears go into them");
    auto untrained = block;
    untrained.attention_norm.batch.mean = untrained.attention_norm.batch.variance = {};
    CHECK(error_of([&] { fold(untrained, folded, "c"); }) == "fold: norm has no running statistics to fold");
}

TEST_CASE("transformer_block: what does not fit is refused", "[layer]") {
    using Catch::Matchers::StartsWith;
    parameters weights;
    const transformer_block<layer_norm<float>, multi_head<float>, feed_forward<float>> block{
        .attention = random_multi_head<float>(weights, "attention", 24, 3, 3, 8, 8),
        .feed_forward = random_feed_forward(weights, "mlp", 24, 48)};
    const auto x = random_rows<float>({2, 1, 9, 24}, 3), thin = random_rows<float>({2, 1, 9, 23}, 3);
    CHECK(error_of([&] { result_of(block, x); }) == nothing_thrown);
    CHECK(error_of([&] { result_of(block, thin); }) == "multi_head: tokens has shape (2, 1, 9, 23), but (batch, 1, tokens, 24) is needed");
    CHECK_THAT(error_of([&] { (void)forward(block, {.tokens = x, .residual = x}); }), StartsWith("transformer_block: residual is given"));
    auto narrowing = block;
    narrowing.attention.out = random_linear<float>(weights, "narrow", 20, 24);
    CHECK(error_of([&] { result_of(narrowing, x); }) ==
          "transformer_block: attention makes (2, 1, 9, 20) of tokens of shape (2, 1, 9, 24)");
    auto misnormed = block;
    const std::vector<float> seven(7);
    misnormed.feed_forward_norm.weight = seven;
    CHECK_THAT(error_of([&] { result_of(misnormed, x); }), StartsWith("layer_norm: weight has 7 entries"));
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEST_CASE("transformer_block: a whole block allocates nothing once its workspace exists", "[layer]") {
    parameters weights;
    const transformer_block<layer_norm<float>, multi_head<float>, feed_forward<float>> block{
        .attention = random_multi_head<float>(weights, "attention", 24, 3, 3, 8, 8),
        .feed_forward = random_feed_forward(weights, "mlp", 24, 48)};
    auto x = random_rows<float>({2, 1, 70, 24}, 3);
    thread_pool pool(2);
    workspace memory(block.workspace_bytes(x.shape(), {}, 2));
    const execution run(pool, memory);
    const auto call = [&] { forward(block, {.tokens = x}, x.view(), run); };
    call();
    CHECK(allocations_in(call) == 0);
}
#endif

} // namespace attn::testing
