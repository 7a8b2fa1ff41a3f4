// Linear attention, simplified and focused: what distinguishes them, beyond what the conformance suite asks of every operator.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/reference/linear_attention.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
double largest_difference(const tensor_view<const T>& a, const tensor_view<const T>& b) {
    const auto wide = reference::widen(b);
    tensor<T> narrow(a.shape());
    for (index_t e = 0, h = 0; h < a.shape().heads; ++h)
        for (index_t i = 0; i < a.shape().tokens; ++i)
            for (index_t c = 0; c < a.shape().channels; ++c) narrow.data()[e++] = a(0, h, i, c);
    return largest_error(narrow, wide);
}

/// What an operator says of a call.
template <class Op>
std::string refusal(const Op& op, const inputs<float>& in) {
    sequential here;
    return error_of([&] { (void)attend(op, in, here); });
}

} // namespace

// At these channels 11 keys are scored, and 12 are summed. A key without positive channels changes nothing but that.
TEMPLATE_TEST_CASE("linear_attention: both orders of evaluation agree", "[linear]", ATTN_TEST_NUMBERS) {
    auto in = random_given<TestType>({1, 2, 1, 64, 12, 8, 20});
    for (index_t c = 0; c < 8; ++c) in.keys(0, 0, 11, c) = -1;
    const linear_attention<relu> op;
    const auto summed = attend(op, in.queries, in.keys, in.values);
    const auto scored = attend(op, in.queries, in.keys.slice({.tokens = {0, 11}}), in.values.slice({.tokens = {0, 11}}));
    CHECK(largest_difference<TestType>(summed.view(), scored.view()) <= 16 * epsilon<TestType>);
    CHECK(!same_bits(summed, scored)); // so it was another order
}

// relu says that it is idempotent; the same map that does not say so has its features written first.
TEMPLATE_TEST_CASE("linear_attention: bits do not depend on where the map is applied", "[linear][portable]", ATTN_TEST_NUMBERS) {
    const auto silent = [](auto x) { return relu{}(x); };
    for (const index_t d_v : {32, 64, 80}) {
        auto in = random_given<TestType>({1, 2, 1, 150, 150, 32, d_v});
        in.queries.data()[70 * 32] = std::numeric_limits<TestType>::quiet_NaN();
        const auto one = attend(linear_attention{.feature_map = relu{}}, in.queries, in.keys, in.values);
        const auto other = attend(linear_attention{.feature_map = silent}, in.queries, in.keys, in.values);
        index_t wrong = 0;
        for (index_t e = 0; e < one.shape().size(); ++e) {
            const bool is_nan = e / d_v == 70;
            wrong += std::isnan(one.data()[e]) != is_nan || (!is_nan && one.data()[e] != other.data()[e]);
        }
        CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("simplified_linear_attention: a query orthogonal to all keys gives the convolution alone", "[linear]", ATTN_TEST_NUMBERS) {
    auto in = random_given<TestType>({1, 2, 2, 35, 35, 8, 20});
    for (index_t e = 0; e < in.queries.shape().size(); e += 3) in.queries.data()[e] = -1;
    for (index_t c = 0; c < 8; ++c) in.queries(0, 0, 4, c) = in.queries(0, 1, 20, c) = -1;
    const auto weights = random_tensor<TestType>({1, 20, 5, 5}, 5);
    const simplified_linear_attention<dense, TestType> op{.convolution = {.weights = weights.view(), .height = 5, .width = 7}};
    const auto out = attend(op, in.queries, in.keys, in.values);
    tensor<TestType> local(out.shape());
    add_convolution(op.convolution, in.values.view(), local.view());
    for (index_t c = 0; c < 20; ++c) {
        CHECK(out(0, 0, 4, c) == local(0, 0, 4, c));
        CHECK(out(0, 1, 20, c) == local(0, 1, 20, c));
        CHECK(out(0, 0, 5, c) != local(0, 0, 5, c));
    }
}

TEST_CASE("focused_linear_attention: a power of one and one head is relu attention", "[linear]") {
    const auto in = random_given<double>({1, 1, 1, 30, 40, 8, 9});
    const auto shifted = []<class S>(S x) { return relu{}(x) + S(1e-6); };
    const auto focused = attend(focused_linear_attention<dense, double>{.power = 1}, in.queries, in.keys, in.values);
    const auto plain = attend(linear_attention{.feature_map = shifted}, in.queries, in.keys, in.values);
    CHECK(largest_difference<double>(focused.view(), plain.view()) <= 1e-4);
}

// The norm of a large power of many channels that are alike lies far below the numbers of the precision, unless the largest is 1.
TEMPLATE_TEST_CASE("focused_linear_attention: large powers of many channels", "[linear]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const int power : {3, 15, 40, 200})
        for (const bool alike : {true, false}) {
            INFO("power " << power << (alike ? ", channels alike" : ""));
            auto in = random_given<T>({1, 2, 2, 5, 6, 700, 3});
            for (auto* t : {&in.queries, &in.keys})
                for (index_t e = 0; e < t->shape().size(); ++e)
                    t->data()[e] = alike ? (e < 700 ? T{0} : T(1.5)) : 1 + std::abs(t->data()[e]) / static_cast<T>(8 * power); // a token of zeros
            const focused_linear_attention<dense, T> op{.power = power};
            const auto ours = attend(op, in.queries, in.keys, in.values);
            const auto q = reference::widen(in.queries.view()), k = reference::widen(in.keys.view()), v = reference::widen(in.values.view());
            const auto f = reference::focused_features<double, double>(q.view(), power, {});
            auto g = reference::focused_features<double, double>(k.view(), power, {});
            for (index_t e = 0; e < g.shape().size(); ++e) g.data()[e] /= 6;
            tensor<double> exact(ours.shape());
            reference::linear_attention<double>({f, g, v}, {exact}, identity_features{}, dense{}, true, op.eps, 1);
            CHECK(largest_error(ours, exact) <= (128 + 8 * power) * epsilon<T> * largest_magnitude(exact));
        }
}

TEST_CASE("linear attentions: what does not fit is refused", "[linear]") {
    const auto in = random_given<float>({1, 2, 1, 12, 12, 4, 5});
    const inputs<float> call = in;
    check_says(refusal(linear_attention{.eps = -1.0}, call), {"linear_attention: eps is -1"});
    check_says(refusal(linear_attention{.scale = 0.5}, call), {"linear_attention: scale "});
    const std::vector<index_t> three{1, 2, 3};
    check_says(refusal(linear_attention{.pattern = lengths{three}}, call), {"linear_attention: pattern lengths"});

    const tensor<float> weights({1, 5, 3, 3}), row({1, 5, 1, 3}), encoding({1, 1, 11, 4}), input({1, 1, 11, 5});
    simplified_linear_attention<> op{.convolution = {.weights = weights.view(), .height = 3, .width = 4}};
    CHECK(refusal(op, call) == nothing_thrown);
    op.positional_encoding = encoding.view();
    check_says(refusal(op, call), {"simplified_linear_attention: positional_encoding has shape (1, 1, 11, 4), but k has (1, 1, 12, 4)"});
    op.positional_encoding = {};
    op.convolution_input = input.view();
    check_says(refusal(op, call), {"simplified_linear_attention: convolution_input has shape (1, 1, 11, 5), but q has (1, 2, 12, 4)"});
    op.convolution_input = {};
    op.convolution.width = 5;
    check_says(refusal(op, call), {"simplified_linear_attention: height and width are 3 and 5"});
    check_says(refusal(simplified_linear_attention<causal>{.convolution = {.weights = row.view()}}, call), {"convolution is not causal"});
    check_says(refusal(focused_linear_attention<>{.power = 0}, call), {"focused_linear_attention: power is 0"});
    const std::vector<float> scale(8);
    check_says(refusal(focused_linear_attention<>{.scale = scale}, call), {"focused_linear_attention: scale has 8 entries"});

    tensor<float> out({1, 2, 12, 5}), log_sum_exp({1, 2, 12, 1});
    sequential here;
    workspace memory(std::size_t{1} << 22);
    CHECK_THROWS_WITH(attend(linear_attention{}, call, outputs<float>{out, log_sum_exp}, execution(here, memory)),
                      "linear_attention: log_sum_exp is asked for, but without a softmax there is none");
}

// gcc 12.2 has made of what is not given something that is, in an operator that is handed on.
TEST_CASE("simplified_linear_attention: an operator that is handed on has what it was made of", "[attention]") {
    const tensor<float> q({1, 4, 64, 16}), weights({1, 16, 1, 5});
    tensor<float> out(q.shape());
    sequential here;
    workspace memory(std::size_t{1} << 22);
    const execution run(here, memory);
    const auto twice = [&](auto op) {
        for (int n = 0; n < 2; ++n) attend(op, inputs<float>{q, q, q}, outputs<float>{out}, run);
    };
    CHECK_NOTHROW(twice(simplified_linear_attention{.convolution = depthwise_convolution<float>{.weights = weights}}));
}

} // namespace attn::testing
