// Talking-heads attention: what its formula promises, beside what the conformance tests hold every operator to.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/strided.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

using matrix = tensor<double>;

matrix random_matrix(index_t rows, index_t columns, unsigned seed) { return random_tensor<double>({1, 1, rows, columns}, seed, 1); }

/// With as much workspace as it asks for, or with the least.
template <class Op, Scalar T>
answer<T> run(const Op& op, const given<T>& in, bool least = false) {
    const auto s = shapes_of(inputs<T>(in));
    sequential here;
    auto result = no_answer<T>(op.output_shape(s), log_sum_exp_shape(op, s));
    workspace memory(least ? least_workspace_bytes<T>(op, s) : workspace_bytes<T>(op, s, here));
    attn::attend(op, inputs<T>(in), result.out(), execution(here, memory));
    return result;
}

/// The heads of a tensor in another order.
template <Scalar T>
tensor<T> with_heads(const tensor<T>& from, const std::vector<index_t>& order) {
    const auto& s = from.shape();
    tensor<T> to({s.batch, std::ssize(order), s.tokens, s.channels});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < std::ssize(order); ++h)
            std::copy_n(from.view().row(b, order[static_cast<std::size_t>(h)], 0), s.tokens * s.channels, to.view().row(b, h, 0));
    return to;
}

std::string refusal(const talking_heads_attention<>& op, const input_shapes& s) {
    const tensor<float> q(s.queries), k(s.keys), v(s.values);
    return error_of([&] { op.check(inputs<float>{q, k, v}); });
}

constexpr input_shapes six_heads{{1, 6, 9, 8}, {1, 3, 11, 8}, {1, 2, 11, 5}};

} // namespace

TEMPLATE_TEST_CASE("talking heads: by hand", "[attention]", ATTN_TEST_NUMBERS) {
    // One query of 1 in each of two heads, so that keys are logits L = (ln 2, 0) and (0, ln 3); J = L0 + L1 = (ln 2, ln 3) and L1 + ln 5
    // for key 0 and key 1 alike, which the softmax does not notice; P = (2/5, 3/5) and (1/4, 3/4); W = P0 - 2 P1 + 1 = (9/10, 1/10); v =
    // (10, 100).
    given<TestType> in{tensor<TestType>({1, 2, 1, 1}), tensor<TestType>({1, 2, 2, 1}), tensor<TestType>({1, 1, 2, 1})};
    in.queries.data()[0] = in.queries.data()[1] = 1;
    in.keys(0, 0, 0, 0) = static_cast<TestType>(std::log(2));
    in.keys(0, 1, 1, 0) = static_cast<TestType>(std::log(3));
    in.values.data()[0] = 10;
    in.values.data()[1] = 100;
    matrix logits({1, 1, 2, 2}), weights({1, 1, 1, 2});
    logits(0, 0, 0, 0) = logits(0, 0, 0, 1) = logits(0, 0, 1, 1) = 1;
    weights(0, 0, 0, 0) = 1;
    weights(0, 0, 0, 1) = -2;
    const std::vector<double> logits_bias{0, std::log(5)}, weights_bias{1};
    const auto out =
        run(talking_heads_attention{.logits_mix = logits, .logits_bias = logits_bias, .weights_mix = weights, .weights_bias = weights_bias},
            in);
    const auto close_to = [](double value) { return Approx(value).epsilon(8 * epsilon<TestType>); };
    CHECK(static_cast<double>(out.values.data()[0]) == close_to(19));
    CHECK(static_cast<double>(out.log_sum_exp.data()[0]) == close_to(std::log(5)));
    CHECK(static_cast<double>(out.log_sum_exp.data()[1]) == close_to(std::log(20)));
}

TEMPLATE_TEST_CASE("talking heads: less workspace means two passes to the same bits", "[attention]", ATTN_TEST_NUMBERS) {
    const auto mix = random_matrix(3, 3, 1);
    const talking_heads_attention op{.logits_mix = mix, .weights_mix = mix};
    const auto in = random_given<TestType>({2, 3, 3, 70, 200, 17, 20});
    CHECK(same_bits(run(op, in, true), run(op, in)));
    // Bands, so that panels see blocks whole, in part and not at all.
    const talking_heads_attention banded{.logits_mix = mix, .weights_mix = mix, .pattern = causal{} & local{70}};
    auto many = random_given<TestType>({1, 3, 3, 600, 600, 5, 4});
    CHECK(same_bits(run(banded, many, true), run(banded, many)));
    many.values(0, 1, 300, 2) = std::numeric_limits<TestType>::quiet_NaN();
    const auto spoiled = run(banded, many);
    CHECK(same_bits(run(banded, many, true), spoiled));
    for (index_t i = 0; i < 600; ++i) CHECK(std::isnan(spoiled.values(0, 1, i, 2)) == (i >= 300 && i <= 370));

    sequential here;
    const auto s = shapes_of(inputs<TestType>(in));
    workspace enough(workspace_bytes<TestType>(op, s, here)), short_of_one(workspace_bytes<TestType>(op, s, here) - 1);
    CHECK(op.template keeps_weights<TestType>(s, execution(here, enough)));
    CHECK(!op.template keeps_weights<TestType>(s, execution(here, short_of_one)));
    CHECK(talking_heads_attention{.logits_mix = mix}.keeps_weights<TestType>(s, execution(here, short_of_one)));
}

TEST_CASE("talking heads: memory", "[attention]") {
    const auto mix = random_matrix(12, 12, 1);
    const talking_heads_attention both{.logits_mix = mix, .weights_mix = mix}, logits{.logits_mix = mix};
    const auto shapes = [](index_t n) { return problem{1, 12, 12, n, n, 64, 64}.shapes(); };
    CHECK(both.least_workspace_bytes<float>(shapes(64), 1) == both.least_workspace_bytes<float>(shapes(1 << 20), 1));
    CHECK(logits.workspace_bytes<float>(shapes(1024), 1) == logits.workspace_bytes<float>(shapes(1 << 20), 1));
    // A panel's weights, for 64 of them a maximum and one row that spreads them over the cache, and who sees the key.
    constexpr std::size_t panel = kernel::talking_heads_memory<float>::max_queries * sizeof(float);
    const auto growth = both.workspace_bytes<float>(shapes(8192), 1) - both.workspace_bytes<float>(shapes(4096), 1);
    CHECK(growth < 4096 * 12 * panel * 66 / 64 + 4096 * sizeof(std::uint64_t) + 4096);
    CHECK(both.workspace_bytes<float>(shapes(4096), 3) < 3 * both.workspace_bytes<float>(shapes(4096), 1) + 4096);
}

TEST_CASE("talking heads: what the patterns cost", "[attention]") {
    const auto mix = random_matrix(4, 2, 1);
    const auto pairs = [&](const auto& pattern, index_t n, const positions& where = {}) {
        return visited_pairs(talking_heads_attention{.logits_mix = mix, .pattern = pattern}, {{3, 2, n, 8}, {3, 2, n, 8}, {3, 4, n, 8}},
                             where);
    };
    CHECK(pairs(dense{}, 100).visible == 3 * 100 * 100);
    CHECK(pairs(dense{}, 100).visited == 3 * 100 * 100);
    // Once for all heads, of which none sees more than the triangle.
    const auto triangle = pairs(causal{}, 1000);
    CHECK(triangle.visible == 3 * 1000 * 1001 / 2);
    CHECK((triangle.visited > triangle.visible && triangle.visited < triangle.visible + 3 * 1000 * 32));
    // Heads that differ: the widest band, and every pair that is in one of two.
    CHECK(pairs((on_heads{0, 3} & local{5}) | (on_heads{3, 4} & local{9}), 300).visible == pairs(local{9}, 300).visible);
    const auto apart = (on_heads{0, 1} & local{2}) | (on_heads{1, 4} & strided{6});
    CHECK(pairs(apart, 60).visible == pairs(local{2} | strided{6}, 60).visible);
    // Of every sixth key alone only these are visited.
    CHECK(pairs(strided{6}, 60).visited == 3 * 60 * 10);
    CHECK(pairs(causal{}, 10, {.first_query = 10}).visible == 3 * 100);
}

TEMPLATE_TEST_CASE("talking heads: no heads between leave zeros", "[attention]", ATTN_TEST_NUMBERS) {
    const matrix none({1, 1, 0, 2}), all({1, 1, 3, 0});
    const std::vector<double> bias(3, 1.0);
    const auto out = run(talking_heads_attention{.logits_mix = none, .weights_mix = all, .weights_bias = bias},
                         random_given<TestType>({1, 2, 1, 5, 9, 4, 6}));
    CHECK(out.values.shape() == shape{1, 3, 5, 6});
    CHECK(std::all_of(out.values.data(), out.values.data() + 90, [](auto x) { return x == 0; }));
}

TEST_CASE("talking heads: keys and values may have other numbers of heads", "[attention]") {
    const auto mix = random_matrix(4, 6, 1);
    CHECK(refusal(talking_heads_attention{.logits_mix = mix}, six_heads) == nothing_thrown);
    auto in = given<double>{random_tensor<double>(six_heads.queries, 1), random_tensor<double>(six_heads.keys, 2),
                            random_tensor<double>(six_heads.values, 3)};
    const auto out = run(talking_heads_attention{.logits_mix = mix}, in);
    in.keys = with_heads(in.keys, {0, 0, 1, 1, 2, 2});
    in.values = with_heads(in.values, {0, 0, 1, 1});
    CHECK(same_bits(run(talking_heads_attention{.logits_mix = mix}, in), out));
}

TEST_CASE("talking heads: what does not fit is refused by name", "[attention]") {
    const auto six = random_matrix(6, 6, 1), five = random_matrix(6, 5, 1), to_four = random_matrix(4, 6, 1),
               to_three = random_matrix(3, 6, 1);
    const matrix batch({2, 1, 6, 6});
    const std::vector<double> numbers(5);
    check_says(refusal({.logits_mix = five}, six_heads), {"talking_heads_attention: logits_mix ", "(1, 1, 6, 5)", "q has (1, 6, 9, 8)", "6)"});
    check_says(refusal({.logits_mix = batch}, six_heads), {"talking_heads_attention: logits_mix ", "(2, 1, 6, 6)"});
    check_says(refusal({.weights_mix = five}, six_heads), {"talking_heads_attention: weights_mix ", "(1, 1, 6, 5)", "q has (1, 6, 9, 8)"});
    check_says(refusal({.logits_mix = to_four, .weights_mix = six}, six_heads),
         {"talking_heads_attention: weights_mix ", "(1, 1, 6, 6)", "logits_mix has (1, 1, 4, 6)", "(1, 1, heads, 4)"});
    check_says(refusal({.logits_mix = tensor_view<const double>(nullptr, {1, 1, 6, 6}, {})}, six_heads), {"logits_mix ", "null"});
    check_says(refusal({.logits_mix = six, .logits_bias = numbers}, six_heads),
         {"talking_heads_attention: logits_bias ", "5 entries", "6 heads"});
    check_says(refusal({.weights_mix = six, .weights_bias = numbers}, six_heads),
         {"talking_heads_attention: weights_bias ", "5 entries", "6 heads"});
    check_says(refusal({.logits_bias = numbers}, six_heads), {"talking_heads_attention: logits_bias ", "without logits_mix"});
    const auto is_too_large = "is 1e+39, which is not finite as a float"; // it would be infinite, and results NaN
    const std::vector<double> large_bias{0, 0, 0, 0, 0, 1e39};
    check_says(refusal({.logits_mix = six, .logits_bias = large_bias}, six_heads), {"talking_heads_attention: logits_bias ", is_too_large});
    check_says(refusal({.weights_mix = six, .weights_bias = large_bias}, six_heads), {"talking_heads_attention: weights_bias ", is_too_large});
    tensor<double> large_mix(six.shape());
    large_mix(0, 0, 5, 5) = 1e39;
    check_says(refusal({.logits_mix = large_mix}, six_heads), {"talking_heads_attention: logits_mix ", is_too_large});
    check_says(refusal({.weights_mix = large_mix}, six_heads), {"talking_heads_attention: weights_mix ", is_too_large});
    check_says(refusal({.weights_bias = numbers}, six_heads), {"talking_heads_attention: weights_bias ", "without weights_mix"});
    check_says(refusal({.logits_mix = to_four, .sinks = numbers}, six_heads), {"talking_heads_attention: sinks ", "5 entries", "4 heads"});
    check_says(refusal({.logits_mix = to_three}, six_heads), {"talking_heads_attention: v ", "(1, 2, 11, 5)", "out has (1, 3, 9, 5)", "divide"});
    check_says(refusal({}, {six_heads.queries, {1, 4, 11, 8}, six_heads.values}),
         {"talking_heads_attention: k ", "(1, 4, 11, 8)", "(1, 6, 9, 8)", "divide"});
    check_says(refusal({}, {six_heads.queries, six_heads.keys, {1, 2, 10, 5}}), {"talking_heads_attention: v ", "tokens"});
    check_says(refusal({.scale = std::numeric_limits<double>::infinity()}, six_heads), {"talking_heads_attention: scale ", "finite"});
}

} // namespace attn::testing
