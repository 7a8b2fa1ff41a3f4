// Softmax attention with everything at once: strides, windows, lengths, biases that hide keys, caps, sinks, grouped heads, positions.
#include "softmax_checks.hpp"

#include <attn/pattern/causal.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/score/composed_score.hpp>

namespace attn::testing {

using namespace pattern;

TEMPLATE_TEST_CASE("softmax: strided keys with a bias that hides some", "[attention]", ATTN_TEST_NUMBERS) {
    for (const index_t keys : {97, 700}) { // of 3 residue classes, 700 keys are more than a tile
        const auto bias = hiding_bias<TestType>({2, 1, 61, keys}, 5);
        const softmax_attention op{.score = additive_bias(bias.view(), 7, 2), .pattern = strided{3}};
        check_against_reference(op, random_given<TestType>({2, 2, 1, 61, keys, 8, 12, {.first_query = 7, .first_key = 2}}));
    }
}

TEMPLATE_TEST_CASE("softmax: everything at once", "[attention]", ATTN_TEST_NUMBERS) {
    const problem p{2, 4, 2, 75, 430, 16, 9, {.first_query = 380, .first_key = 10}};
    const auto bias = hiding_bias<TestType>({1, 4, 75, 430}, 5);
    const std::vector<index_t> length{100, 433};
    const std::vector<double> sinks{-1, 0, 1, 2};
    const softmax_attention op{.scale = 0.5,
                               .score = composed_score{soft_cap{6}, additive_bias(bias.view(), 380, 10)},
                               .pattern = causal{} & (local{20} | strided{3}) & lengths{length},
                               .sinks = sinks};
    check_against_reference(op, random_given<TestType>(p));
}

TEMPLATE_TEST_CASE("softmax: a bias of -infinity hides a key that holds NaN", "[attention]", ATTN_TEST_NUMBERS) {
    auto in = random_given<TestType>({1, 2, 1, 40, 60, 8, 9});
    auto bias = random_tensor<TestType>({1, 1, 40, 60}, 4);
    for (index_t i = 0; i < 40; ++i) bias(0, 0, i, 17) = -std::numeric_limits<TestType>::infinity();
    const softmax_attention op{.score = additive_bias(bias.view())};
    const auto expected = attend_rows<TestType>(op, in);
    for (auto* t : {&in.keys, &in.values})
        for (index_t c = 0; c < 8; ++c) (*t)(0, 0, 17, c) = std::numeric_limits<TestType>::quiet_NaN();
    CHECK(same_bits(attend_rows<TestType>(op, in), expected));
}

} // namespace attn::testing
