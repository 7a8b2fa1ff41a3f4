// The layers one by one, against their formulas in double.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "layer_checks.hpp"

#include <attn/layer/ragged.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>

namespace attn::testing {

TEMPLATE_TEST_CASE("linear: sizes, biases and residuals", "[layer]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto& [batch, tokens, inputs, outputs] : std::vector<std::array<index_t, 4>>{{1, 1, 1, 1},
                                                                                          {2, 5, 7, 3},
                                                                                          {3, 17, 64, 65},
                                                                                          {1, 97, 130, 33},
                                                                                          {2, 0, 4, 4},
                                                                                          {0, 3, 4, 4},
                                                                                          {2, 3, 0, 5},
                                                                                          {2, 3, 5, 0},
                                                                                          {1, 400, 40, 20}})
        for (const bool has_bias : {false, true}) {
            INFO(batch << " x " << tokens << " x " << inputs << " to " << outputs);
            parameters weights;
            const auto layer = random_linear<T>(weights, "linear", outputs, inputs, has_bias);
            const auto x = random_rows<T>({batch, 1, tokens, inputs}, 3);
            const auto expected = plain_linear(wide(x), layer);
            CHECK(close(result_of(layer, x), expected));
            if (expected.shape().size() > 0) check_bits(layer, x);
        }
}

TEMPLATE_TEST_CASE("feed_forward: with and without a gate", "[layer]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto& [batch, tokens, width, hidden] : std::vector<std::array<index_t, 4>>{{2, 9, 12, 37}, {1, 1, 1, 1}, {3, 300, 16, 20}}) {
        const auto x = random_rows<T>({batch, 1, tokens, width}, 3);
        parameters weights;
        const feed_forward<T> plain{.up = random_linear<T>(weights, "up", hidden, width),
                                    .down = random_linear<T>(weights, "down", width, hidden)};
        CHECK(close(result_of(plain, x), plain_feed_forward(wide(x), plain, plain_gelu)));
        check_bits(plain, x);
        const feed_forward<T, silu> gated{
            .up = plain.up, .down = plain.down, .gate = random_linear<T>(weights, "gate", hidden, width, false)};
        CHECK(close(result_of(gated, x), plain_feed_forward(wide(x), gated, plain_silu)));
        check_bits(gated, x);
    }
}

TEMPLATE_TEST_CASE("multi_head: grouped heads, sizes of keys and values, context, positions", "[layer]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    parameters weights;
    const auto x = random_rows<T>({2, 1, 19, 24}, 3), y = random_rows<T>({2, 1, 30, 24}, 4);

    const auto grouped = random_multi_head<T>(weights, "grouped", 24, 4, 2, 10, 7);
    CHECK(close(result_of(grouped, x), plain_multi_head(wide(x), grouped, plain_softmax())));
    check_bits(grouped, x);

    CHECK(close(forward(grouped, {.tokens = x, .context = y}),
                plain_multi_head(wide(x), wide(y), grouped, plain_softmax(), [](auto&, index_t) {})));

    // A context of no tokens is one, with memory and without.
    const tensor<T> nothing({2, 1, 0, 24});
    const auto of_nothing = head_major<const T>(nullptr, nothing.shape());
    const auto of_nobody = forward(grouped, {.tokens = x, .context = nothing});
    CHECK(close(of_nobody, plain_multi_head(wide(x), wide(nothing), grouped, plain_softmax(), [](auto&, index_t) {})));
    CHECK(same_bits(forward(grouped, {.tokens = x, .context = of_nothing}), of_nobody));
    const std::vector<index_t> of_queries{0, 19}, of_keys{0, 0};
    const auto entry = x.slice({.batch = {0, 1}});
    tensor<T> alone({1, 1, 19, grouped.out.outputs()});
    forward(grouped, ragged{of_queries, of_keys}, {.tokens = entry, .context = head_major<const T>(nullptr, {1, 1, 0, 24})}, alone);
    CHECK(std::equal(alone.data(), alone.data() + alone.shape().size(), of_nobody.data()));

    // Values from a context of their own, of other channels.
    const auto z = random_rows<T>({2, 1, 30, 17}, 5);
    auto apart = grouped;
    apart.v = random_linear<T>(weights, "apart.v", 2 * 7, 17);
    const auto of_values = [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>&) {
        return plain_softmax()(q, k, heads_of(plain_linear(wide(z), apart.v), 2));
    };
    CHECK(close(forward(apart, {.tokens = x, .context = y, .value_context = z}),
                plain_multi_head(wide(x), wide(y), grouped, of_values, [](auto&, index_t) {})));
    CHECK(error_of([&] { (void)forward(apart, {.tokens = x, .value_context = z}); }) ==
          "multi_head: value_context is given without a context, of the keys");
    CHECK(error_of([&] { (void)forward(apart, {.tokens = x, .context = y, .value_context = y}); }) ==
          "multi_head: value_context has shape (2, 1, 30, 24), but (batch, 1, tokens, 17) is needed");
    const auto short_one = random_rows<T>({2, 1, 29, 17}, 5);
    CHECK(error_of([&] { (void)forward(apart, {.tokens = x, .context = y, .value_context = short_one}); }) ==
          "multi_head: value_context has shape (2, 1, 29, 17), but the context has (2, 1, 30, 24)");

    // Norms of queries and keys, before they are turned.
    const auto gains = random_rows<T>({1, 1, 1, 10}, 6);
    const std::span<const T> gain(gains.data(), 10);
    const rotary<T> all_turns(64, 10);
    const multi_head normed{.heads = 4, .kv_heads = 2, .q = grouped.q, .k = grouped.k, .v = grouped.v, .out = grouped.out, .rotation = &all_turns,
                            .query_norm = rms_norm{.weight = gain}, .key_norm = rms_norm{.weight = gain}};
    const auto norm_and_turn = [&](tensor<double>& t, index_t first) {
        for (index_t row = 0; row < t.shape().size() / 10; ++row) {
            double* const from = t.data() + row * 10;
            double squares = 0;
            for (index_t c = 0; c < 10; ++c) squares += from[c] * from[c] / 10;
            for (index_t c = 0; c < 10; ++c) from[c] *= static_cast<double>(gains(0, 0, 0, c)) / std::sqrt(squares + 1e-5);
        }
        plain_rotary(t, 10, false, first);
    };
    CHECK(close(result_of(normed, x), plain_multi_head(wide(x), wide(x), normed, plain_softmax(), norm_and_turn)));
    check_bits(normed, x);
    auto narrow = normed;
    narrow.key_norm.weight = gain.first(9);
    CHECK(error_of([&] { (void)result_of(narrow, x); }) == "rms_norm: weight has 9 entries, but x has shape (2, 2, 19, 10)");

    // Gates: one for each number of the result, or one for each head.
    for (const index_t outputs : {4 * 7, 4}) {
        auto gated = grouped;
        gated.gate = random_linear<T>(weights, "gate" + std::to_string(outputs), outputs, 24);
        CHECK(close(result_of(gated, x), plain_multi_head(wide(x), gated, plain_softmax())));
        CHECK(close(forward(gated, {.tokens = x, .context = y}), plain_multi_head(wide(x), wide(y), gated, plain_softmax(), [](auto&, index_t) {})));
        check_bits(gated, x);
    }
    auto wrong = grouped;
    wrong.gate = random_linear<T>(weights, "gate of two", 2, 24);
    CHECK(error_of([&] { (void)result_of(wrong, x); }) ==
          "multi_head: gate has a weight of shape (1, 1, 2, 24), but 28 outputs are needed, or 4, one a head");
    wrong.gate = random_linear<T>(weights, "gate of other tokens", 4, 23);
    CHECK(error_of([&] { (void)result_of(wrong, x); }) ==
          "multi_head: gate has a weight of shape (1, 1, 4, 23), but 4 outputs of 24 inputs are needed");

    // Cosine attention: Swin v2's.
    const multi_head cosines{.heads = 4, .kv_heads = 2, .q = grouped.q, .k = grouped.k, .v = grouped.v, .out = grouped.out,
                             .query_norm = unit_norm<T>{}, .key_norm = unit_norm<T>{}};
    const auto to_unit = [&](tensor<double>& t, index_t) {
        for (index_t row = 0; row < t.shape().size() / 10; ++row) {
            double* const from = t.data() + row * 10;
            double squares = 0;
            for (index_t c = 0; c < 10; ++c) squares += from[c] * from[c];
            for (index_t c = 0; c < 10; ++c) from[c] /= std::sqrt(squares);
        }
    };
    CHECK(close(result_of(cosines, x), plain_multi_head(wide(x), wide(x), cosines, plain_softmax(), to_unit)));
    check_bits(cosines, x);

    for (const bool interleaved : {false, true}) {
        const rotary<T> turns(64, 6, interleaved ? rotary_pairs::interleaved : rotary_pairs::half_split);
        auto rotated = grouped;
        rotated.rotation = &turns;
        const auto turn = [&](auto& t, index_t first) { plain_rotary(t, 6, interleaved, first); };
        CHECK(close(forward(rotated, {.tokens = x, .context = y, .positions = {.first_query = 20, .first_key = 9}}),
                    plain_multi_head(wide(x), wide(y), rotated, plain_softmax(), turn, {.first_query = 20, .first_key = 9})));
        // Softmax of turned scores depends on distances alone.
        CHECK(close(forward(rotated, {.tokens = x, .positions = {.first_query = 41, .first_key = 41}}), wide(result_of(rotated, x))));
        check_bits(rotated, x);

        // The same positions, given for each token.
        tensor<index_t> of_tokens({.tokens = x.shape().tokens, .channels = 1}), of_context({.tokens = y.shape().tokens, .channels = 1});
        for (index_t i = 0; i < x.shape().tokens; ++i) of_tokens(0, 0, i, 0) = 20 + i;
        for (index_t j = 0; j < y.shape().tokens; ++j) of_context(0, 0, j, 0) = 9 + j;
        auto placed = rotated;
        placed.token_positions = of_tokens;
        CHECK(same_bits(forward(placed, {.tokens = x}), forward(rotated, {.tokens = x, .positions = {.first_query = 20, .first_key = 20}})));
        placed.context_positions = of_context;
        CHECK(same_bits(forward(placed, {.tokens = x, .context = y}),
                        forward(rotated, {.tokens = x, .context = y, .positions = {.first_query = 20, .first_key = 9}})));
        of_context(0, 0, 1, 0) = 64;
        CHECK(error_of([&] { (void)forward(placed, {.tokens = x, .context = y}); }) ==
              "multi_head: k has a token at position 64, but rotary has 0 to 63");
    }
}

TEST_CASE("layers: what does not fit is refused by layer, argument and shapes", "[layer]") {
    using Catch::Matchers::StartsWith;
    parameters weights;
    const auto x = random_rows<float>({2, 1, 9, 24}, 3);
    const auto l = random_linear<float>(weights, "l", 8, 24);
    const auto refused = [](const auto& layer, const layer_inputs<float>& in) { return error_of([&] { (void)forward(layer, in); }); };
    const auto thin = random_rows<float>({2, 1, 9, 23}, 3), two_heads = random_rows<float>({2, 2, 9, 24}, 3);
    CHECK(refused(l, {.tokens = thin}) == "linear: tokens has shape (2, 1, 9, 23), but (batch, 1, tokens, 24) is needed");
    CHECK_THAT(refused(l, {.tokens = two_heads}), StartsWith("linear: tokens has shape (2, 2, 9, 24)"));
    CHECK_THAT(refused(l, {.tokens = x, .residual = x}),
               StartsWith("linear: residual has shape (2, 1, 9, 24), but the result has (2, 1, 9, 8)"));
    auto biased = l;
    biased.bias = biased.bias.first(7);
    CHECK_THAT(refused(biased, {.tokens = x}), StartsWith("linear: weight has a bias of 7 entries"));

    const feed_forward<float> ff{.up = l, .down = random_linear<float>(weights, "down", 24, 9)};
    CHECK(refused(ff, {.tokens = x}) == "feed_forward: down has a weight of shape (1, 1, 24, 9), but 24 outputs of 8 inputs are needed");

    const auto good = random_multi_head<float>(weights, "m", 24, 4, 2, 6, 6);
    CHECK(refused(good, {.tokens = x}) == nothing_thrown);
    auto bad = good;
    bad.heads = 5;
    CHECK_THAT(refused(bad, {.tokens = x}),
               StartsWith("multi_head: q has a weight of shape (1, 1, 24, 24), whose outputs do not make 5 heads"));
    bad = good;
    bad.heads = 3;
    CHECK(refused(bad, {.tokens = x}) == "multi_head: k has 12 outputs, 6 for each of 2 kv_heads, but q has 24, 8 for each of 3 heads");
    bad = good;
    bad.out = random_linear<float>(weights, "wide", 24, 25);
    CHECK(refused(bad, {.tokens = x}) == "multi_head: out has a weight of shape (1, 1, 24, 25), but 24 outputs of 24 inputs are needed");
    CHECK_THAT(refused(good, {.tokens = x, .context = thin}), StartsWith("multi_head: context has shape (2, 1, 9, 23)"));
    const auto other_batch = random_rows<float>({3, 1, 9, 24}, 3);
    CHECK_THAT(refused(good, {.tokens = x, .context = other_batch}), StartsWith("multi_head: context has shape (3, 1, 9, 24)"));
    const rotary<float> turns(8, 6), wide_turns(9, 8);
    bad = good;
    bad.rotation = &turns;
    CHECK(refused(bad, {.tokens = x}) == "multi_head: q lies at positions 0 to 8, but rotary has 0 to 7");
    bad.rotation = &wide_turns;
    CHECK_THAT(refused(bad, {.tokens = x}), Contains("but rotary turns 8 channels"));
    CHECK_THAT(error_of([] { rotary<float>(4, 5); }), Contains("turned in pairs"));

    tensor<float> out({2, 1, 9, 8});
    sequential here;
    workspace none;
    CHECK_THAT(error_of([&] { forward(l, {.tokens = x}, out.view(), execution(here, none)); }),
               StartsWith("linear: workspace has 0 bytes"));
    workspace some(l.workspace_bytes(x.shape(), {}, 1));
    CHECK_THAT(error_of([&] { forward(l, {.tokens = x}, head_major(const_cast<float*>(x.data()), out.shape()), execution(here, some)); }),
               Contains("overlaps tokens"));
    CHECK_THAT(error_of([&] {
                   forward(l, {.tokens = x}, out.slice({.tokens = {0, 8}}), execution(here, some));
               }),
               StartsWith("linear: out has shape (2, 1, 8, 8)"));
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEST_CASE("layers: forward allocates nothing", "[layer]") {
    parameters weights;
    const rotary<float> turns(40, 8);
    auto layer = random_multi_head<float>(weights, "m", 24, 4, 2, 8, 7);
    layer.rotation = &turns;
    const feed_forward<float, silu> ff{.up = random_linear<float>(weights, "up", 50, 24),
                                       .down = random_linear<float>(weights, "down", 24, 50),
                                       .gate = random_linear<float>(weights, "gate", 50, 24)};
    const auto x = random_rows<float>({2, 1, 30, 24}, 3);
    tensor<float> out(x.shape());
    thread_pool pool(2);
    const auto none_in = [&](const auto& l) {
        workspace memory(l.workspace_bytes(x.shape(), {}, 2));
        const execution run(pool, memory);
        const auto call = [&] { forward(l, {.tokens = x, .residual = x}, out.view(), run); };
        call();
        return allocations_in(call) == 0;
    };
    CHECK(none_in(layer));
    CHECK(none_in(ff));
}
#endif

} // namespace attn::testing
