// fold and reparameterised: the same function without a norm.
#include "catch.hpp"
#include "norm_checks.hpp"

#include <attn/norm/fold.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>

namespace attn::testing {

namespace {

/// y = W x + b row by row, in double.
template <Scalar T>
tensor<double> applied(const tensor<double>& x, const linear_view<T>& linear) {
    auto s = x.shape();
    s.channels = linear.weight.shape().tokens;
    tensor<double> y(s);
    for (index_t i = 0; i < s.tokens; ++i)
        for (index_t o = 0; o < s.channels; ++o) {
            double sum = linear.bias.empty() ? 0 : static_cast<double>(linear.bias[static_cast<std::size_t>(o)]);
            for (index_t c = 0; c < x.shape().channels; ++c) sum += static_cast<double>(linear.weight(0, 0, o, c)) * x(0, 0, i, c);
            y(0, 0, i, o) = sum;
        }
    return y;
}

template <Scalar T>
struct parts {
    std::vector<T> weight, bias;
    std::vector<double> mean, variance;
    rep_batch_norm<T> norm;

    explicit parts(index_t channels)
        : weight(random_numbers<T>(channels, 1, 1)), bias(random_numbers<T>(channels, 2)), mean(random_numbers<double>(channels, 3, 2)),
          variance(static_cast<std::size_t>(channels), 1.7), norm{{weight, bias, mean, variance}, 0.8} {}
    parts(const parts&) = delete;

    /// The norm in double.
    tensor<double> apply(const tensor<double>& x) const {
        tensor<double> y(x.shape());
        const auto w = widened(weight), b = widened(bias);
        reference::rep_batch_norm<double>(x.view(), y.view(), mean, variance, w, b, 0.8, 1e-5);
        return y;
    }
};

} // namespace

TEMPLATE_TEST_CASE("fold: a norm into the next linear, in place and apart, with and without a bias", "[norm]", ATTN_TEST_NUMBERS) {
    for (const auto& [outputs, inputs] : {std::pair<index_t, index_t>{5, 7}, {1, 1}, {33, 64}})
        for (const bool has_bias : {true, false}) {
            const parts<TestType> p(inputs);
            auto w = random_rows<TestType>({1, 1, outputs, inputs}, 5, 0, 0.2);
            auto b = random_numbers<TestType>(outputs, 6);
            const auto x = random_rows<TestType>({1, 1, 9, inputs}, 7);
            const linear_view<TestType> linear{w, has_bias ? std::span(b) : std::span<TestType>{}};
            const auto expected = applied(p.apply(reference::widen(x.view())), linear);

            tensor<TestType> folded_w(w.shape());
            std::vector<TestType> folded_b(b.size());
            const auto deviation = fold(p.norm, linear, {folded_w, folded_b}, x);
            const auto ours = applied<TestType>(reference::widen(x.view()), {folded_w, folded_b});
            CHECK(largest_error(ours, expected) <= (std::same_as<TestType, double> ? 400 : 40) * epsilon<TestType>); // in double, of both sides
            CHECK(std::abs(largest_error(ours, expected) - deviation) <= 64 * epsilon<double>);
            CHECK(fold(p.norm, linear, {folded_w, folded_b}) == 0);

            const linear_view<TestType> in_place{w, b};
            if (!has_bias) std::ranges::fill(b, TestType{0});
            CHECK(fold(p.norm, in_place, in_place, x) == deviation);
            CHECK(same_bits(w, folded_w));
            CHECK(b == folded_b);
        }
}

TEMPLATE_TEST_CASE("fold: a norm into the linear before it", "[norm]", ATTN_TEST_NUMBERS) {
    for (const auto& [outputs, inputs] : {std::pair<index_t, index_t>{5, 7}, {1, 1}, {33, 64}, {4, 0}})
        for (const bool has_bias : {true, false}) {
            const parts<TestType> p(outputs);
            auto w = random_rows<TestType>({1, 1, outputs, inputs}, 5, 0, 0.2);
            auto b = random_numbers<TestType>(outputs, 6);
            const auto x = random_rows<TestType>({1, 1, 9, inputs}, 7);
            const linear_view<TestType> linear{w, has_bias ? std::span(b) : std::span<TestType>{}};
            const auto expected = p.apply(applied(reference::widen(x.view()), linear));
            const progressive_rep_batch_norm<layer_norm<TestType>> progressive{{}, p.norm};
            if (!has_bias) std::ranges::fill(b, TestType{0});
            const auto deviation = fold(linear, progressive, {w, b}, x);
            const auto ours = applied<TestType>(reference::widen(x.view()), {w, b});
            CHECK(largest_error(ours, expected) <= (std::same_as<TestType, double> ? 400 : 40) * epsilon<TestType>); // in double, of both sides
            CHECK(std::abs(largest_error(ours, expected) - deviation) <= 64 * epsilon<double>);
        }
}

TEMPLATE_TEST_CASE("fold: a plain batch_norm by hand", "[norm]", ATTN_TEST_NUMBERS) {
    // norm(x) = (x - 3) / 2 * 4 + 1 = 2 x - 5; then y = 10 x' + 7 = 20 x - 43; before: y = 2 (10 x + 7) - 5 = 20 x + 9.
    const std::vector<TestType> weight{4}, bias{1};
    const std::vector<double> mean{3}, variance{3};
    const batch_norm<TestType> norm{weight, bias, mean, variance, 1};
    std::vector<TestType> w{10}, b{7}, folded_w(1), folded_b(1);
    const shape one{.tokens = 1, .channels = 1};
    const linear_view<TestType> linear{head_major(w.data(), one), b}, folded{head_major(folded_w.data(), one), folded_b};
    fold(norm, linear, folded);
    CHECK(folded_w[0] == 20);
    CHECK(folded_b[0] == -43);
    fold(linear, norm, folded);
    CHECK(folded_w[0] == 20);
    CHECK(folded_b[0] == 9);
}

TEMPLATE_TEST_CASE("reparameterised: RepBN as a plain batch_norm", "[norm]", ATTN_TEST_NUMBERS) {
    const parts<TestType> p(37);
    std::vector<TestType> weight(37), bias(37);
    const auto plain = reparameterised(p.norm, std::span(weight), std::span(bias));
    const auto x = random_rows<TestType>({2, 1, 50, 37}, 8);
    const auto expected = normalise(p.norm, x);
    CHECK(largest_error(normalise(plain, x), reference::widen(expected.view())) <= 40 * epsilon<TestType>);
    const auto close = [](TestType a, double b) { return std::abs(static_cast<double>(a) - b) <= 4 * epsilon<TestType>; };
    CHECK(close(weight[5], static_cast<double>(p.weight[5]) + 0.8 * std::sqrt(1.7 + 1e-5)));
    CHECK(close(bias[5], static_cast<double>(p.bias[5]) + 0.8 * p.mean[5]));
}

} // namespace attn::testing
