#include <attn/core/tensor.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/number.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/composed_score.hpp>

#include "catch.hpp"

#include <array>
#include <initializer_list>

using namespace attn;
using namespace attn::pattern;

namespace {

using attn::index_t; // POSIX has another

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

template <Scalar T = double>
tensor<T> filled(const shape& s, std::initializer_list<double> numbers) {
    tensor<T> result(s);
    REQUIRE(static_cast<index_t>(numbers.size()) == s.size());
    std::ranges::transform(numbers, result.data(), [](double number) { return static_cast<T>(number); });
    return result;
}

/// Numbers between -1 and 1 that repeat in no short period.
template <Scalar T = double>
tensor<T> wavy(const shape& s, double seed) {
    tensor<T> result(s);
    for (index_t e = 0; e < s.size(); ++e)
        result.data()[e] = static_cast<T>(std::sin(seed + 1.7 * static_cast<double>(e) + 0.01 * static_cast<double>(e * e % 97)));
    return result;
}

template <Scalar T>
struct answer {
    tensor<T> values, log_sum_exp;
};

struct everything {
    std::optional<double> scale = {};
    std::span<const double> sinks = {};
    attn::positions positions = {};
};

/// Every element is overwritten: both tensors begin as NaN.
template <Scalar T, ScoreFunction S = identity_score, Pattern P = dense>
answer<T> attend(const tensor<T>& q, const tensor<T>& k, const tensor<T>& v, const everything& with = {}, const S& score = {},
                 const P& pattern = {}) {
    const auto [batch, heads, n, d_k] = q.shape();
    answer<T> result{tensor<T>({batch, heads, n, v.shape().channels}), tensor<T>({batch, heads, n, 1})};
    std::fill_n(result.values.data(), result.values.shape().size(), std::numeric_limits<T>::quiet_NaN());
    std::fill_n(result.log_sum_exp.data(), result.log_sum_exp.shape().size(), std::numeric_limits<T>::quiet_NaN());
    reference::softmax<T>({q, k, v, with.positions}, {result.values, result.log_sum_exp}, with.scale, score, pattern, with.sinks);
    return result;
}

/// One head, one channel of queries and keys: the scores of query row i are q[i] * k.
tensor<double> column(std::initializer_list<double> numbers) {
    return filled({.tokens = static_cast<index_t>(numbers.size()), .channels = 1}, numbers);
}

double at(const tensor<double>& t, index_t row, index_t channel = 0) { return t(0, 0, row, channel); }

Approx close(double value) { return Approx(value).epsilon(1e-14).margin(1e-300); }

TEST_CASE("equal scores average the values", "[reference][portable]") {
    const auto [values, log_sum_exp] = attend(column({0, 0}), column({5, -3, 7, 1}), column({1, 2, 3, 6}));
    CHECK(at(values, 0) == close(3));
    CHECK(at(values, 1) == close(3));
    CHECK(at(log_sum_exp, 0) == close(std::log(4)));
}

TEST_CASE("two keys by hand", "[reference][portable]") {
    // Scores log 3 and 0: weights 3/4 and 1/4.
    const auto [values, log_sum_exp] = attend(column({std::log(3)}), column({1, 0}), column({8, 4}));
    CHECK(at(values, 0) == close(7));
    CHECK(at(log_sum_exp, 0) == close(std::log(4)));
}

TEST_CASE("the scale is 1 / sqrt(d_k) unless given", "[reference][portable]") {
    const auto q = filled({.tokens = 1, .channels = 4}, {2, 0, 1, 1});
    const auto k = filled({.tokens = 2, .channels = 4}, {2, 9, 1, 1, 0, 7, 0, 0});
    const auto v = column({1, 0});
    CHECK(at(attend(q, k, v).values, 0) == close(1 / (1 + std::exp(-3))));
    CHECK(at(attend(q, k, v, {.scale = 0.1}).values, 0) == close(1 / (1 + std::exp(-0.6))));
    CHECK(at(attend(q, k, v, {.scale = 0}).values, 0) == 0.5);
}

TEST_CASE("large scores neither overflow nor lose the largest", "[reference][portable]") {
    for (const double sign : {1.0, -1.0}) {
        const auto [values, log_sum_exp] = attend(column({sign * 1e4}), column({sign, sign - sign * 1e-4}), column({1, 0}));
        CHECK(at(values, 0) == Approx(1 / (1 + std::exp(-1))).epsilon(1e-10));
        CHECK(at(log_sum_exp, 0) == close(1e4 + std::log1p(std::exp(-1))));
    }
    CHECK(at(attend(column({1}), column({-1e4, -1e4}), column({2, 4})).values, 0) == 3);
}

TEST_CASE("a sink takes its share", "[reference][portable]") {
    // Keys of weight 3 and 1, a sink of weight 4.
    const std::array<double, 1> sink{std::log(4)};
    const auto [values, log_sum_exp] = attend(column({std::log(3)}), column({1, 0}), column({8, 4}), {.sinks = sink});
    CHECK(at(values, 0) == close(28.0 / 8));
    CHECK(at(log_sum_exp, 0) == close(std::log(8)));
}

TEST_CASE("a row that sees nothing is zero", "[reference][portable]") {
    const std::array<double, 1> sink{-2.5};
    const auto hidden = predicate{[](auto i, auto j) { return i > 0 && j >= 0; }};
    const auto q = column({1, 1}), k = column({1, 2}), v = column({3, 3});
    const auto [values, log_sum_exp] = attend(q, k, v, {}, identity_score{}, hidden);
    CHECK(at(values, 0) == 0);
    CHECK(at(log_sum_exp, 0) == -infinity);
    CHECK(at(values, 1) == close(3));
    const auto with_sink = attend(q, k, v, {.sinks = sink}, identity_score{}, hidden);
    CHECK(at(with_sink.values, 0) == 0);
    CHECK(at(with_sink.log_sum_exp, 0) == -2.5);
}

TEST_CASE("no keys and no queries", "[reference][portable]") {
    const std::array<double, 1> sink{1.5};
    const auto q = column({1, not_a_number});
    const tensor<double> none({.tokens = 0, .channels = 1});
    const auto [values, log_sum_exp] = attend(q, none, none);
    for (index_t i = 0; i < 2; ++i) {
        CHECK(at(values, i) == 0);
        CHECK(at(log_sum_exp, i) == -infinity);
        CHECK(at(attend(q, none, none, {.sinks = sink}).log_sum_exp, i) == 1.5);
    }
    CHECK(attend(none, q, q).values.shape().tokens == 0);
    CHECK(attend(tensor<double>({0, 2, 3, 1}), tensor<double>({0, 1, 3, 1}), tensor<double>({0, 1, 3, 1})).values.shape().size() == 0);
}

TEST_CASE("log_sum_exp is optional", "[reference][portable]") {
    const auto q = column({1}), k = column({1}), v = column({4});
    tensor<double> values({.tokens = 1, .channels = 1});
    reference::softmax<double>({q, k, v}, {values});
    CHECK(at(values, 0) == 4);
}

TEST_CASE("a hidden key has no influence, whatever it holds", "[reference][portable]") {
    std::array<double, 3> bias_numbers{0, -infinity, 0};
    const additive_bias<double> bias{head_major(static_cast<const double*>(bias_numbers.data()), {.tokens = 1, .channels = 3})};
    const auto not_the_second = predicate{[](auto, auto j) { return j != 1; }};
    for (const double bad : {not_a_number, infinity, -infinity}) {
        const auto q = column({1}), k = column({std::log(3), bad, 0}), v = column({8, bad, 4});
        const auto by_pattern = attend(q, k, v, {}, identity_score{}, not_the_second);
        CHECK(at(by_pattern.values, 0) == close(7));
        CHECK(at(by_pattern.log_sum_exp, 0) == close(std::log(4)));
        const auto by_bias = attend(q, k, v, {}, bias);
        CHECK(at(by_bias.values, 0) == close(7));
        CHECK(at(by_bias.log_sum_exp, 0) == close(std::log(4)));
    }
}

TEST_CASE("a row whose keys are all hidden by a bias is empty", "[reference][portable]") {
    std::array<double, 1> hide{-infinity};
    const additive_bias<double> bias{head_major(static_cast<const double*>(hide.data()), {.tokens = 1, .channels = 1})};
    const auto [values, log_sum_exp] = attend(column({not_a_number}), column({1, 2}), column({3, not_a_number}), {}, bias);
    CHECK(at(values, 0) == 0);
    CHECK(at(log_sum_exp, 0) == -infinity);
}

TEST_CASE("NaN reaches the rows that see it and no others", "[reference][portable]") {
    const auto zeros = column({0, 0, 0});
    const auto seen_by_rows_1_and_2 = [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
        const auto [values, log_sum_exp] = attend(q, k, v, {}, identity_score{}, causal{});
        return std::array{std::isnan(at(values, 0)), std::isnan(at(values, 1)), std::isnan(at(values, 2)), std::isnan(at(log_sum_exp, 1))};
    };
    CHECK(seen_by_rows_1_and_2(zeros, column({0, not_a_number, 0}), zeros) == std::array{false, true, true, true});
    CHECK(seen_by_rows_1_and_2(zeros, zeros, column({0, not_a_number, 0})) == std::array{false, true, true, false});
    CHECK(seen_by_rows_1_and_2(column({0, not_a_number, 0}), zeros, zeros) == std::array{false, true, false, true});
    // The only key it sees, and one whose weight underflows.
    CHECK(std::isnan(at(attend(column({1}), column({not_a_number}), column({1})).values, 0)));
    CHECK(std::isnan(at(attend(column({1}), column({0, -1e6}), column({1, not_a_number})).values, 0)));
}

TEST_CASE("a value of NaN stays in its channel", "[reference][portable]") {
    const auto v = filled({.tokens = 2, .channels = 2}, {1, not_a_number, 3, 4});
    const auto values = attend(column({0}), column({0, 0}), v).values;
    CHECK(at(values, 0, 0) == 2);
    CHECK(std::isnan(at(values, 0, 1)));
}

TEST_CASE("any strides of inputs and outputs", "[reference][portable]") {
    const shape s{2, 3, 4, 5};
    const auto q = wavy(s, 1);
    tensor<double> turned(s), values({2, 3, 4, 5});
    const auto tokens_first = token_major(turned.data(), s);
    for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t i = 0; i < 4; ++i)
                for (index_t c = 0; c < 5; ++c) tokens_first(b, h, i, c) = q(b, h, i, c);
    reference::softmax<double>({tokens_first, tokens_first, tokens_first}, {token_major(values.data(), s)});
    const auto expected = attend(q, q, q).values;
    for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t i = 0; i < 4; ++i)
                for (index_t c = 0; c < 5; ++c) CHECK(token_major(values.data(), s)(b, h, i, c) == expected(b, h, i, c));
}

TEST_CASE("a sum of products is rounded to the scalar after each term", "[reference][portable]") {
    const shape s{.tokens = 1, .channels = 3};
    const auto log_sum_exp = [&]<class T>(T) {
        return static_cast<double>(
            attend(filled<T>(s, {1e8, 1, -1e8}), filled<T>(s, {1, 1, 1}), filled<T>(s, {0, 0, 0}), {.scale = 1}).log_sum_exp(0, 0, 0, 0));
    };
    CHECK(log_sum_exp(1.0) == 1);
    CHECK(log_sum_exp(1.0F) == 0);
}

TEST_CASE("float computes in float, close to its widened double", "[reference][portable]") {
    const auto q = wavy<float>({1, 2, 7, 8}, 1), k = wavy<float>({1, 2, 9, 8}, 2), v = wavy<float>({1, 2, 9, 3}, 3);
    const auto single = attend(q, k, v);
    const auto both = attend(reference::widen(q.view()), reference::widen(k.view()), reference::widen(v.view()));
    double largest = 0;
    for (index_t h = 0; h < 2; ++h)
        for (index_t i = 0; i < 7; ++i)
            for (index_t c = 0; c < 3; ++c) {
                const auto error = std::abs(static_cast<double>(single.values(0, h, i, c)) - both.values(0, h, i, c));
                if (!(error <= largest)) largest = error;
            }
    CHECK(largest < 1e-6);
    CHECK(largest > 1e-10);
}

} // namespace
