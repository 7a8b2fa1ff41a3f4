// The contract of a row, for what attn_random does not cut: norms and layers. A row of the result has the same bits however many rows the
// call has, and wherever in it the row stands.
#include "catch.hpp"
#include "layer_checks.hpp"

#include <attn/attention/linear_attention.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr index_t all_rows = 333;

/// How many rows differ from those of the one call if it is cut into calls of 1, 2, 3 ... rows. result(first, count): of such rows.
template <class F>
index_t rows_that_differ(const F& result) {
    const auto whole = result(0, all_rows);
    const auto& s = whole.shape();
    index_t different = 0;
    for (const index_t rows : {1, 2, 3, 7, 16, 17, 48, 64, 100})
        for (index_t first = 0; first < all_rows; first += rows) {
            const auto part = result(first, std::min(rows, all_rows - first));
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < part.shape().tokens; ++i)
                    different += !std::equal(part.view().row(0, h, i), part.view().row(0, h, i) + s.channels, whole.view().row(0, h, first + i),
                                             [](auto a, auto b) { return same_bits(a, b); });
        }
    return different;
}

} // namespace

TEMPLATE_TEST_CASE("the contract of a row: norms", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t channels : {1, 19, 64, 197}) {
        INFO(channels << " channels");
        const auto x = random_rows<T>({1, 2, all_rows, channels}, 1, 3);
        const auto weight = random_numbers<T>(channels, 2), bias = random_numbers<T>(channels, 3);
        const auto mean = random_numbers<double>(channels, 4);
        const std::vector<double> variance(static_cast<std::size_t>(channels), 2.5);
        const auto check = [&](const auto& norm) {
            INFO(norm.name);
            CHECK(rows_that_differ([&](index_t first, index_t count) { return normalise(norm, x.slice({.tokens = {first, count}})); }) == 0);
        };
        const batch_norm<T> batch{weight, bias, mean, variance};
        check(layer_norm<T>{weight, bias});
        check(rms_norm<T>{weight});
        check(unit_norm<T>{});
        check(dynamic_tanh<T>{weight, bias});
        check(dynamic_erf<T>{.weight = weight, .shift = 0.25});
        check(batch);
        check(rep_batch_norm<T>{batch, 0.7});
        check(progressive_rep_batch_norm<layer_norm<T>>{{weight, bias}, {batch, 0.7}});
    }
}

TEMPLATE_TEST_CASE("the contract of a row: linear and feed_forward", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t channels : {5, 64, 150}) {
        INFO(channels << " channels");
        parameters weights;
        const auto x = random_rows<T>({1, 1, all_rows, channels}, 1);
        const auto one = random_linear<T>(weights, "one", 37, channels);
        const feed_forward<T> mlp{.up = random_linear<T>(weights, "up", 83, channels), .down = random_linear<T>(weights, "down", channels, 83)};
        CHECK(rows_that_differ([&](index_t first, index_t count) { return forward(one, {.tokens = x.slice({.tokens = {first, count}})}); }) == 0);
        CHECK(rows_that_differ([&](index_t first, index_t count) {
                  return forward(mlp, {.tokens = x.slice({.tokens = {first, count}}), .residual = x.slice({.tokens = {first, count}})});
              }) == 0);
    }
}

// The keys of all rows are the context, so that a call of some rows sees what the call of all of them sees.
TEST_CASE("the contract of a row: multi_head and transformer_block", "[layer][portable]") {
    constexpr index_t channels = 24, behind = 60;
    parameters weights;
    const auto x = random_rows<float>({1, 1, all_rows, channels}, 1), context = random_rows<float>({1, 1, all_rows + behind, channels}, 2);
    const auto part = [&](index_t first, index_t count) {
        return layer_inputs<float>{.tokens = x.slice({.tokens = {first, count}}), .context = context, .positions = {.first_query = behind + first}};
    };
    const auto attention = random_multi_head<float>(weights, "softmax", channels, 3, 3, 8, 8, softmax_attention{.pattern = causal{}});
    CHECK(rows_that_differ([&](index_t first, index_t count) { return forward(attention, part(first, count)); }) == 0);

    const auto heads = random_multi_head<float>(weights, "linear", channels, 3, 3, 8, 8, linear_attention{.pattern = causal{}});
    const feed_forward<float> mlp{.up = random_linear<float>(weights, "up", 2 * channels, channels),
                                  .down = random_linear<float>(weights, "down", channels, 2 * channels)};
    const std::vector<float> scale(channels, 1.5f);
    const transformer_block<layer_norm<float>, std::remove_cv_t<decltype(heads)>, feed_forward<float>> block{{scale}, heads, {scale}, mlp};
    CHECK(rows_that_differ([&](index_t first, index_t count) { return forward(block, part(first, count)); }) == 0);
}

} // namespace attn::testing
