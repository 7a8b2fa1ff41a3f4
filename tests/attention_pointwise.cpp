// Pointwise attention: its ready weights, what is hidden, and what is refused. attn_random compares it with its definition.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/pointwise_backward.hpp>
#include <attn/attention/pointwise_weight.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/reference/pointwise.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
tensor<T> constant(const shape& s, T number) {
    tensor<T> all(s);
    std::fill_n(all.data(), s.size(), number);
    return all;
}

/// One query and one key of one channel whose score is x, and a value of 1: the weight that the kernel gives.
template <Scalar T, class F>
T weight_of(const F& weight, T x) {
    const tensor<T> one = constant<T>({1, 1, 1, 1}, T{1}), key = constant<T>({1, 1, 1, 1}, x);
    return attend(pointwise_attention{.weight = weight}, one, key, one)(0, 0, 0, 0);
}
/// And its slope, as the gradient of the query has it.
template <Scalar T, class F>
T slope_of(const F& weight, T x) {
    const tensor<T> one = constant<T>({1, 1, 1, 1}, T{1}), query = constant<T>({1, 1, 1, 1}, x);
    tensor<T> d_query({1, 1, 1, 1});
    backward(pointwise_attention{.weight = weight}, inputs<T>{query, one, one}, {one}, {one}, {{.queries = d_query}});
    return d_query(0, 0, 0, 0);
}

} // namespace

TEMPLATE_TEST_CASE("pointwise_attention: ready weights and their slopes", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const double x : {-60.0, -3.5, -0.25, 0.0, 0.5, 4.0, 30.0}) {
        // e^x is wrong by what x log2(e) rounds, which without a fused multiply-add is |x| units more.
        const auto close = [&](T ours, double exact) {
            CHECK(std::abs(static_cast<double>(ours) - exact) <= (8 + std::abs(x)) * epsilon<T> * std::abs(exact));
        };
        const auto s = 1 / (1 + std::exp(-(x - 2)));
        close(weight_of<T>(sigmoid{-2}, static_cast<T>(x)), s);
        close(slope_of<T>(sigmoid{-2}, static_cast<T>(x)), s / (1 + std::exp(x - 2)));
        close(weight_of<T>(relu_over{5}, static_cast<T>(x)), std::max(x, 0.0) / 5);
        close(slope_of<T>(relu_over{5}, static_cast<T>(x)), x > 0 ? 0.2 : 0);
        close(weight_of<T>(squared_relu{}, static_cast<T>(x)), x > 0 ? x * x : 0);
        close(slope_of<T>(squared_relu{}, static_cast<T>(x)), x > 0 ? 2 * x : 0);
    }
    for (const T far : {T(-1e30), -std::numeric_limits<T>::max()}) {
        CHECK(weight_of<T>(sigmoid{}, far) == 0);
        CHECK(weight_of<T>(sigmoid{}, -far) == 1);
        CHECK(slope_of<T>(sigmoid{}, far) == 0);
        CHECK(slope_of<T>(sigmoid{}, -far) == 0);
    }
    for (const auto& weight : {weight_of<T>(sigmoid{}, std::numeric_limits<T>::quiet_NaN()), weight_of<T>(relu_over{}, std::numeric_limits<T>::quiet_NaN()),
                               weight_of<T>(squared_relu{}, std::numeric_limits<T>::quiet_NaN())})
        CHECK(std::isnan(weight));
}

TEMPLATE_TEST_CASE("pointwise_attention: a key that a score of -infinity hides is left out, whatever its weight would be", "[attention][portable]",
                   ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto one = []<class S>(S) { return S(1); };
    const auto x = constant<T>({1, 1, 3, 2}, T(0.5));
    auto v = constant<T>({1, 1, 3, 2}, T{2});
    v(0, 0, 1, 0) = std::numeric_limits<T>::quiet_NaN();
    tensor<T> bias({1, 1, 1, 3});
    for (index_t j = 0; j < 3; ++j) bias(0, 0, 0, j) = j == 1 ? -std::numeric_limits<T>::infinity() : T{0};
    const pointwise_attention op{.weight = one, .score = additive_bias{bias}};
    const auto out = attend(op, x, x, v);
    for (index_t e = 0; e < 6; ++e) CHECK(out.data()[e] == 4);

    const auto d_out = constant<T>({1, 1, 3, 2}, T{1});
    tensor<T> d_v(v.shape());
    backward(op, inputs<T>{x, x, v}, {out}, {d_out}, {{.values = d_v}});
    for (index_t e = 0; e < 6; ++e) CHECK(d_v.data()[e] == (e / 2 == 1 ? 0 : 3));

    // A row that sees nothing.
    const auto none = attend(pointwise_attention{.weight = one, .pattern = causal{}}, inputs<T>{x, x, v, {.first_query = 0, .first_key = 5}});
    for (index_t e = 0; e < 6; ++e) CHECK(none.data()[e] == 0);
}

TEST_CASE("pointwise_attention: what is refused", "[attention]") {
    const tensor<float> x({1, 2, 3, 4}), other({1, 2, 5, 4});
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = sigmoid{infinity}}, x, x, x); }), {"pointwise_attention", "weight.bias", "is not finite"});
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = sigmoid{1e39}}, x, x, x); }), {"weight.bias", "not finite as a float"});
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = relu_over{0}}, x, x, x); }), {"pointwise_attention", "weight.keys", "is 0"});
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = squared_relu{}, .scale = infinity}, x, x, x); }), {"scale"});
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = squared_relu{}}, x, x, other); }), {"(1, 2, 5, 4)", "(1, 2, 3, 4)"});
    check_says(error_of([&] { (void)attend(pointwise_attention{.weight = sigmoid{}, .pattern = causal{}}, x, other, other); }), {"pattern", "top_left()"});
    tensor<float> wanted({1, 1, 1, 2});
    check_says(error_of([&] { backward(pointwise_attention{.weight = sigmoid{}}, inputs<float>{x, x, x}, {x}, {x}, {{}, {.bias = wanted}}); }),
               {"wanted.weight.bias", "(1, 1, 1, 2)", "(1, 1, 1, 1)"});
    check_says(error_of([&] { backward(pointwise_attention{.weight = sigmoid{}}, inputs<float>{x, x, x}, {x}, {x, x}, {}); }),
               {"d_out.log_sum_exp", "without a softmax"});
}

} // namespace attn::testing
