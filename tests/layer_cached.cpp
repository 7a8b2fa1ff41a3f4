// Layers with caches: a sequence in chunks has the bits of one call, and what is wrong is refused.
#include "block_checks.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/linear_attention.hpp>
#include <attn/layer/cached.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

namespace attn::testing {

namespace {

/// Runs tokens in chunks: 1, 1, 7, 40, ... of them.
template <CachedLayer L>
tensor<float> in_chunks(const L& layer, sequence<float>& cache, const tensor<float>& x, const execution& run) {
    const auto& s = x.shape();
    tensor<float> out(s);
    index_t chunk = 0;
    static constexpr index_t sizes[] = {1, 1, 7, 40, 130, 3};
    for (index_t first = 0; first < s.tokens; ++chunk) {
        const tensor_part part{.tokens = {first, std::min(sizes[chunk % 6], s.tokens - first)}};
        forward(layer, cache, {x.slice(part)}, out.slice(part), run);
        first += part.tokens.count;
    }
    return out;
}

} // namespace

TEST_CASE("layers with caches: however tokens are cut, a block has the bits of one call", "[layer]") {
    parameters weights;
    const rotary<float> rotation(400, 6);
    const softmax_attention op{.pattern = causal{} & pattern::local{150, 0}};
    auto attention = random_multi_head<float>(weights, "attention", 20, 4, 2, 6, 5, op);
    attention.rotation = &rotation;
    attention.gate = random_linear<float>(weights, "gate", 4 * 5, 20);
    transformer_block<layer_norm<float>, decltype(attention), feed_forward<float>> block{
        random_layer_norm(weights, "norm1", 20), attention, random_layer_norm(weights, "norm2", 20), random_feed_forward(weights, "mlp", 20, 33)};
    const auto x = random_tensor<float>({1, 1, 400, 20}, 1);
    const auto exact = forward(block, {x});
    key_value_pool<float> pool({.kv_heads = 2, .key_channels = 6, .value_channels = 5}, 4);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        sequence<float> cache(pool);
        CHECK(same_bits(in_chunks(block, cache, x, execution(executor)), exact));
        CHECK(cache.size() == 400);
    });
    sequence<float> cache(pool);
    CHECK(same_bits(forward(block, cache, {x}), exact));
    block.post_norm = true;
    cache = sequence<float>(pool);
    CHECK(same_bits(in_chunks(block, cache, x, {}), forward(block, {x})));


    cache = sequence<float>(pool);
    workspace memory(workspace_bytes(attention, cache, {x}));
    sequential here;
    tensor<float> out(x.shape());
    forward(attention, cache, {x}, out.view(), execution(here, memory));
    CHECK(same_bits(out, forward(attention, {x})));
}

TEST_CASE("layers with caches: a cache that turns keys when they are read is a rotation of the layer's", "[layer]") {
    parameters weights;
    const rotary<float> rotation(400, 6);
    auto attention = random_multi_head<float>(weights, "attention", 20, 4, 2, 6, 5, softmax_attention{.pattern = causal{}});
    const auto x = random_tensor<float>({1, 1, 400, 20}, 1);
    attention.rotation = &rotation;
    const auto exact = forward(attention, {x});
    key_value_pool<float> pool({.kv_heads = 2, .key_channels = 6, .value_channels = 5}, 4, {.table = rotation});
    sequence<float> cache(pool);
    sequential here;
    check_says(error_of([&] { in_chunks(attention, cache, x, execution(here)); }), {"multi_head", "rotation", "cache turns"});
    attention.rotation = nullptr;
    CHECK(same_bits(in_chunks(attention, cache, x, execution(here)), exact));
    const auto next = random_tensor<float>({1, 1, 1, 20}, 2);
    check_says(error_of([&] { static_cast<void>(forward(attention, cache, {next})); }), {"softmax_attention", "position 400", "0 to 399"});
    CHECK(cache.size() == 400);
}

TEST_CASE("layers with caches: the keys and values of a context are made once, and stay", "[layer]") {
    parameters weights;
    const rotary<float> rotation(400, 6);
    auto attention = random_multi_head<float>(weights, "attention", 20, 4, 2, 6, 5, softmax_attention{.pattern = causal{} | pattern::local{9, 200}});
    attention.rotation = &rotation;
    attention.gate = random_linear<float>(weights, "gate", 4, 20);
    transformer_block<layer_norm<float>, decltype(attention), feed_forward<float>> block{
        random_layer_norm(weights, "norm1", 20), attention, random_layer_norm(weights, "norm2", 20), random_feed_forward(weights, "mlp", 20, 33)};
    const auto x = random_tensor<float>({1, 1, 90, 20}, 1), y = random_tensor<float>({1, 1, 250, 20}, 2), z = random_tensor<float>(y.shape(), 3);
    tensor<float> gone(y.shape());
    std::fill_n(gone.data(), gone.shape().size(), guard<float>);
    key_value_pool<float> pool({.kv_heads = 2, .key_channels = 6, .value_channels = 5}, 2);
    const auto check = [&](const auto& layer, const tensor_view<const float>& of_values, const tensor_view<const float>& later) {
        const auto exact = forward(layer, {.tokens = x, .context = y, .value_context = of_values, .positions = top_left()});
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            const execution run(executor);
            sequence<float> cache(pool);
            tensor<float> out(x.shape());
            for (index_t first = 0, count = 1; first < 90; first += count, count = std::min<index_t>(3 * count, 90 - first)) {
                const tensor_part part{.tokens = {first, count}};
                const bool begins = first == 0;
                forward(layer, cache,
                        {.tokens = x.slice(part),
                         .context = begins ? y : gone,
                         .value_context = begins ? of_values : later,
                         .positions = {.first_query = first, .first_key = 0}},
                        out.slice(part), run);
                REQUIRE(cache.size() == 250);
            }
            CHECK(same_bits(out, exact));
        });
    };
    check(attention, {}, {});
    check(attention, z, gone);
    check(block, {}, {});
    block.post_norm = true;
    check(block, {}, {});

    sequence<float> cache(pool);
    const layer_inputs<float> in{.tokens = x, .context = y, .positions = top_left()};
    const auto first_bytes = workspace_bytes(block, cache, in);
    sequential here;
    tensor<float> out(x.shape());
    workspace for_first(first_bytes);
    forward(block, cache, in, out.view(), execution(here, for_first));
    CHECK(same_bits(out, forward(block, in)));
    const auto later_bytes = workspace_bytes(block, cache, in);
    CHECK(later_bytes < first_bytes);
    workspace for_later(later_bytes);
    forward(block, cache, in, out.view(), execution(here, for_later));
    CHECK(same_bits(out, forward(block, in)));
}

TEST_CASE("layers with caches: what an executor throws takes no tokens from a cache, and adds none", "[layer]") {
    parameters weights;
    auto attention = random_multi_head<float>(weights, "attention", 20, 4, 2, 24, 17, softmax_attention{.pattern = causal{}});
    attention.gate = random_linear<float>(weights, "gate", 4, 20);
    const transformer_block block{.attention_norm = random_layer_norm(weights, "norm1", 20),
                                  .attention = attention,
                                  .feed_forward_norm = random_layer_norm(weights, "norm2", 20),
                                  .feed_forward = random_feed_forward(weights, "mlp", 20, 33)};
    const auto x = random_tensor<float>({1, 1, 400, 20}, 1);
    const tensor_part begin{.tokens = {0, 50}}, rest{.tokens = {50, 350}};
    key_value_pool<float> pool({.kv_heads = 2, .key_channels = 24, .value_channels = 17}, 4);
    sequence<float> cache(pool);
    static_cast<void>(forward(block, cache, {x.slice(begin)}));
    tensor<float> out(x.slice(rest).shape());
    const fails_at failing;
    index_t failures = 0;
    for (bool done = false; !done;) {
        failing.time = failures;
        try {
            forward(block, cache, {x.slice(rest)}, out.view(), failing);
            done = true;
        } catch (int) {
            ++failures;
            REQUIRE((cache.size() == 50 && cache.pages() == 1));
        }
    }
    CHECK(failures > 1); // of the attention, and of the gate behind it
    CHECK(same_bits(out, rows_of(forward(block, {x}), 50, 350)));
}

TEST_CASE("layers with caches: what is wrong is refused, and the cache is as it was", "[layer]") {
    parameters weights;
    const auto attention = random_multi_head<float>(weights, "attention", 20, 4, 2, 6, 5, softmax_attention{.pattern = causal{}});
    key_value_pool<float> pool({.kv_heads = 2, .key_channels = 6, .value_channels = 5}, 1), other({.kv_heads = 2, .key_channels = 7, .value_channels = 5}, 1);
    sequence<float> cache(pool), wrong(other);
    const auto x = random_tensor<float>({1, 1, 100, 20}, 1), two = random_tensor<float>({2, 1, 3, 20}, 1), narrow = random_tensor<float>({1, 1, 3, 19}, 1);
    static_cast<void>(forward(attention, cache, {x}));
    const auto said = [&](auto& to, const layer_inputs<float>& in) { return error_of([&] { static_cast<void>(forward(attention, to, in)); }); };
    check_says(said(cache, {x}), {"sequence::append", "keys", "(1, 2, 100, 6)", "need 1 pages", "only 0 are free"});
    check_says(said(cache, {two}), {"multi_head", "tokens", "(2, 1, 3, 20)", "one sequence"});
    check_says(said(cache, {narrow}), {"multi_head", "tokens", "(1, 1, 3, 19)"});
    const auto context = random_tensor<float>({1, 1, 30, 20}, 2);
    check_says(said(cache, {.tokens = x, .context = context, .positions = top_left()}), {"multi_head", "context", "(1, 1, 30, 20)", "100 tokens of another"});
    check_says(said(wrong, {.tokens = x, .context = context, .positions = {.first_key = 3}}), {"multi_head", "positions.first_key", "is 3", "begin at 0"});
    check_says(said(wrong, {.tokens = x, .context = context, .positions = top_left()}), {"sequence::append", "keys", "(1, 2, 30, 6)", "(1, 2, 30, 7)"});
    check_says(said(wrong, {.tokens = x, .context = two, .positions = top_left()}), {"multi_head", "context", "(2, 1, 3, 20)"});
    check_says(said(cache, {.tokens = x, .positions = {.first_query = 3}}), {"multi_head", "positions", "a cache"});
    check_says(said(wrong, {x}), {"sequence::append", "keys", "(1, 2, 100, 6)", "(1, 2, 100, 7)"});
    CHECK((cache.size() == 100 && wrong.size() == 0));

    const auto throwing = random_multi_head<float>(weights, "throwing", 20, 4, 2, 6, 5, softmax_attention{.score = [](auto score, auto, auto) {
        throw std::runtime_error("a user's");
        return score;
    }, .pattern = causal{}});
    const auto three = random_tensor<float>({1, 1, 3, 20}, 1);
    CHECK(error_of<std::runtime_error>([&] { static_cast<void>(forward(throwing, cache, {three})); }) == "a user's");
    CHECK(cache.size() == 100);
}

} // namespace attn::testing
