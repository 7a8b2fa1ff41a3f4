// Softmax attention: what its formula promises, beside the bound on its errors that the conformance tests hold every operator to.
#include "softmax_checks.hpp"

#include <attn/score/additive_bias.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
answer<T> softmax(const given<T>& in, std::span<const double> sinks = {}) {
    return attend_rows<T>(softmax_attention{.sinks = sinks}, in);
}

} // namespace

TEMPLATE_TEST_CASE("softmax: by hand", "[attention][portable]", ATTN_TEST_NUMBERS) {
    // One query, scores ln 3, ln 1 and ln 4 (d_k = 1), values 8, 4 and 0.
    given<TestType> in{tensor<TestType>({1, 1, 1, 1}), tensor<TestType>({1, 1, 3, 1}), tensor<TestType>({1, 1, 3, 1})};
    in.queries.data()[0] = 1;
    for (int j = 0; const auto [weight, value] : {std::array{3.0, 8.0}, {1.0, 4.0}, {4.0, 0.0}}) {
        in.keys.data()[j] = static_cast<TestType>(std::log(weight));
        in.values.data()[j++] = static_cast<TestType>(value);
    }
    const auto close = [](double value) { return Approx(value).epsilon(4 * epsilon<TestType>); };
    const auto plain = softmax(in);
    CHECK(static_cast<double>(plain.values.data()[0]) == close(28.0 / 8));
    CHECK(static_cast<double>(plain.log_sum_exp.data()[0]) == close(std::log(8)));
    const std::vector<double> sinks{std::log(6)};
    const auto with_sink = softmax(in, sinks);
    CHECK(static_cast<double>(with_sink.values.data()[0]) == close(2));
    CHECK(static_cast<double>(with_sink.log_sum_exp.data()[0]) == close(std::log(14)));
}

TEMPLATE_TEST_CASE("softmax: scores that rise or fall along the keys, slowly or out of all range", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr index_t keys = 700, channels = 8;
    for (const double step : {0.01, 0.3, 1.0, 7.0, -0.3, -7.0}) { // of a score, from key to key
        INFO("step " << step);
        auto in = random_given<T>({1, 2, 1, 50, keys, channels, 5});
        for (index_t j = 0; j < keys; ++j) in.keys.data()[j * channels] = static_cast<T>(step * static_cast<double>(j) * std::sqrt(8.0));
        const auto look = [&](index_t every) { // the first channel of the queries: the others do not see the slope
            for (index_t i = 0; i < 100; ++i) in.queries.data()[i * channels] = every > 0 && i % every == 1 ? T{1} : T{0};
        };
        look(0);
        const auto level = softmax(in);
        look(3);
        const auto out = softmax(in);

        const auto exact = exact_rows<T>(softmax_attention{}, in);
        const auto bound = 8 * std::max(1.0, keys * std::abs(step)) * epsilon<T>;
        CHECK(largest_error(out.values, exact.values) <= bound);
        CHECK(largest_error(out.log_sum_exp, exact.log_sum_exp) <= bound);
        for (index_t i = 0; i < 100; ++i) {
            if (i % 3 == 1) continue;
            CHECK(std::memcmp(level.values.data() + i * 5, out.values.data() + i * 5, 5 * sizeof(T)) == 0);
            CHECK(same_bits(level.log_sum_exp.data()[i], out.log_sum_exp.data()[i]));
        }
    }
}

TEMPLATE_TEST_CASE("softmax: sinks of every size", "[attention][portable]", ATTN_TEST_NUMBERS) {
    const auto in = random_given<TestType>({1, 5, 1, 20, 30, 4, 3});
    const std::vector<double> sinks{-1e4, -3, 0, 5, 1e4};
    const auto without = softmax(in), with = softmax(in, sinks);
    for (index_t h = 0; h < 5; ++h)
        for (index_t i = 0; i < 20; ++i) {
            const auto sink = sinks[static_cast<std::size_t>(h)], own = static_cast<double>(without.log_sum_exp(0, h, i, 0));
            const auto top = std::max(sink, own), sum = top + std::log(std::exp(sink - top) + std::exp(own - top));
            CHECK(std::abs(static_cast<double>(with.log_sum_exp(0, h, i, 0)) - sum) <= 8 * epsilon<TestType> * (1 + std::abs(sum)));
            for (index_t c = 0; c < 3; ++c) {
                const auto expected = static_cast<double>(without.values(0, h, i, c)) * std::exp(own - sum);
                CHECK(std::abs(static_cast<double>(with.values(0, h, i, c)) - expected) <= 32 * epsilon<TestType>);
            }
        }
}

TEMPLATE_TEST_CASE("softmax: no keys leave zeros and the sinks", "[attention][portable]", ATTN_TEST_NUMBERS) {
    const auto in = random_given<TestType>({1, 2, 2, 20, 0, 4, 3});
    const auto without = softmax(in);
    CHECK(std::all_of(without.values.data(), without.values.data() + 120, [](auto x) { return x == 0; }));
    CHECK(std::all_of(without.log_sum_exp.data(), without.log_sum_exp.data() + 40,
                      [](auto x) { return x == -std::numeric_limits<TestType>::infinity(); }));
    const std::vector<double> sinks{0.5, -2e4};
    const auto with = softmax(in, sinks);
    CHECK(std::all_of(with.values.data(), with.values.data() + 120, [](auto x) { return x == 0; }));
    for (index_t h = 0; h < 2; ++h)
        for (index_t i = 0; i < 20; ++i)
            CHECK(static_cast<double>(with.log_sum_exp(0, h, i, 0)) ==
                  Approx(sinks[static_cast<std::size_t>(h)]).epsilon(4 * epsilon<TestType>));
}

TEMPLATE_TEST_CASE("softmax: values without channels leave log_sum_exp", "[attention][portable]", ATTN_TEST_NUMBERS) {
    const auto in = random_given<TestType>({1, 2, 1, 20, 30, 4, 3});
    const auto expected = softmax(in);
    const given<TestType> narrow{random_tensor<TestType>({1, 2, 20, 4}, 1), random_tensor<TestType>({1, 1, 30, 4}, 2),
                                 tensor<TestType>({1, 1, 30, 0})};
    CHECK(same_bits(softmax(narrow).log_sum_exp, expected.log_sum_exp));
}

// A sum of products that began with its bias would be rounded at the bias's size once for each channel.
TEST_CASE("softmax: a large bias costs no accuracy", "[attention]") {
    for (const index_t keys : {49, 500}) {
        const auto in = random_given<float>({3, 2, 2, 49, keys, 32, 16});
        auto bias = random_tensor<float>({1, 2, 49, keys}, 5);
        for (index_t e = 0; e < bias.shape().size(); ++e) bias.data()[e] *= 10;
        const softmax_attention op{.score = additive_bias(bias.view())};
        const auto ours = attend_rows<float>(op, in);
        const auto exact = exact_rows<float>(op, in);
        auto plain = no_answer<float>(ours.values.shape(), true);
        reference::softmax<float>(in, plain.out(), op.scale, op.score, op.pattern, op.sinks);
        CHECK(largest_error(ours.values, exact.values) <=
              2 * largest_error(plain.values, exact.values) + 4 * epsilon<float> * largest_magnitude(exact.values));
    }
}

TEST_CASE("softmax: extra memory does not depend on the number of tokens", "[attention][portable]") {
    const auto bytes = [](index_t n, index_t m, index_t heads, index_t threads) {
        return softmax_attention{}.workspace_bytes<float>(problem{1, heads, heads, n, m, 64, 64}.shapes(), threads);
    };
    for (const index_t threads : {1, 3}) CHECK(bytes(64, 64, 1, threads) == bytes(1 << 20, 1 << 20, 12, threads));
    // Of several threads, each has a little more: the spans of keys that they may share.
    CHECK(bytes(64, 64, 1, 3) >= 3 * bytes(64, 64, 1, 1));
    CHECK(2 * bytes(64, 64, 1, 3) <= 9 * bytes(64, 64, 1, 1));
}

} // namespace attn::testing
