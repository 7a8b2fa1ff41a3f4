// A bias that is stored in 16 bits: scores are what they are with the widened one.
#include "catch.hpp"
#include "storage.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/score/soft_cap.hpp>

#include <Eigen/Core>

namespace attn::testing {

namespace {

constexpr auto hidden = -std::numeric_limits<float>::infinity();

/// Some keys hidden, some numbers subnormal ones of half.
stored_tensor bias_of(const shape& s, narrow_format format, layout where) {
    auto x = random_tensor<float>(s, 5);
    for (index_t e = 0; e < s.size(); ++e) x.data()[e] = e % 11 == 4 ? hidden : e % 7 == 3 ? x.data()[e] * 0x1p-18F : x.data()[e];
    return {std::move(x), format, where};
}

/// What a call gives, with a bias that is stored so, is what it gives with floats; make(bias) makes the operator.
void check_stored(const problem& p, const shape& s, narrow_format format, layout where, const auto& make) {
    INFO(describe(p) << ", bias " << to_string(s) << ", " << name_of(format) << ", layout " << static_cast<int>(where));
    auto table = bias_of(s, format, where);
    const auto in = random_given<float>(p);
    const auto result = [&](const stored_view<const float>& bias) {
        const auto op = make(additive_bias<float>{bias});
        auto out = no_answer<float>(op.output_shape(p.shapes()), true);
        attend(op, inputs<float>(in), out.out());
        return out;
    };
    CHECK(same_bits(result(stored_view<float>(table.view())), result(table.wide)));
    CHECK(table.guards_intact());
}

const std::vector<problem> problems{{2, 4, 2, 61, 150, 8, 9}, {1, 2, 1, 290, 300, 4, 4}, {2, 8, 2, 1, 97, 16, 5}, {2, 6, 2, 3, 40, 3, 2, {.first_query = 3}}};

} // namespace

TEST_CASE("additive_bias: stored in 16 bits, in any layout, it is widened as it is added", "[score][portable]") {
    for (const auto& p : problems) {
        const auto n = p.queries + p.positions.first_query[0], m = p.keys;
        for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
            for (const auto& where : all_layouts)
                check_stored(p, {1, p.heads, n, m}, format, where.value, [](const auto& bias) { return softmax_attention{.score = bias}; });
            for (const auto& s : std::vector<shape>{{p.batch, 1, n, m}, {1, p.heads, 1, m}, {1, p.heads, n, 1}, {1, 1, 1, 1}}) {
                check_stored(p, s, format, layout::head_major, [](const auto& bias) { return softmax_attention{.score = bias, .pattern = causal{}}; });
                check_stored(p, s, format, layout::padded_rows, [](const auto& bias) {
                    return softmax_attention{.score = composed_score{soft_cap{2}, bias}, .pattern = pattern::local{5} | pattern::strided{7}};
                });
                check_stored(p, s, format, layout::head_major, [](const auto& bias) { return talking_heads_attention{.score = bias}; });
            }
        }
    }
}

TEST_CASE("additive_bias: stored in 16 bits, gradients are those of the widened one", "[score][portable]") {
    const auto& p = problems.front();
    const auto in = random_given<float>(p);
    for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
        auto table = bias_of({1, p.heads, p.queries, p.keys}, format, layout::padded_rows);
        const auto gradient = [&](const additive_bias<float>& bias) {
            const softmax_attention op{.score = composed_score{bias, soft_cap{3}}};
            const auto s = op.output_shape(p.shapes());
            auto saved = no_answer<float>(s, true);
            attend(op, inputs<float>(in), saved.out());
            const auto given = random_tensor<float>(s, 7);
            std::array<tensor<float>, 2> found{tensor<float>(p.shapes().keys), tensor<float>(bias.bias.shape())};
            typename decltype(op)::template gradients<float> wanted;
            wanted.keys = found[0];
            std::get<0>(wanted.score).bias = found[1];
            backward(op, inputs<float>(in), {saved.values, saved.log_sum_exp}, {given, {}}, wanted);
            return found;
        };
        const auto ours = gradient({stored_view<float>(table.view())}), expected = gradient({table.wide});
        CHECK(same_bits(ours[0], expected[0]));
        CHECK(same_bits(ours[1], expected[1]));
        CHECK(largest_magnitude(reference::widen(ours[1].view())) > 0);
    }
}

TEMPLATE_TEST_CASE("additive_bias: of a tensor of 16-bit numbers, also for the reference", "[score][deduction]", Eigen::bfloat16, Eigen::half) {
    const problem p{1, 2, 1, 5, 6, 4, 4};
    const auto in = random_given<float>(p);
    tensor<TestType> table({1, 2, 5, 6});
    tensor<float> wide(table.shape());
    for (index_t e = 0; e < wide.shape().size(); ++e) {
        table.data()[e] = static_cast<TestType>(e == 8 ? hidden : 0.1F * static_cast<float>(e));
        wide.data()[e] = static_cast<float>(table.data()[e]);
    }
    const additive_bias bias{table};
    STATIC_REQUIRE(std::same_as<decltype(bias), const additive_bias<float>>);
    CHECK(bias.at(0, 1)(0.5F, 3, 2) == 0.5F + wide(0, 1, 3, 2));
    CHECK(bias.at(0, 0)(std::numeric_limits<float>::quiet_NaN(), 1, 2) == hidden);
    const auto by_definition = [&](const auto& score) {
        auto out = no_answer<float>({1, 2, 5, 4}, true);
        reference::softmax<float>(inputs<float>(in), out.out(), {}, score);
        return out;
    };
    CHECK(same_bits(by_definition(bias), by_definition(additive_bias{wide})));
}

} // namespace attn::testing
