// The gradient of focused linear attention: of what the operator refers to against finite differences, and what is refused.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/focused_linear_backward.hpp>

#include <numeric>

namespace attn::testing {

namespace {

/// A call, and the operator's arrays.
template <Scalar T>
struct focused_call {
    tensor<T> q, k, v, given, weights, bias, encoding, input, scale;
    std::vector<index_t> length;

    focused_call(const input_shapes& s, index_t heads_of_scale, index_t batch_of_encoding, index_t heads_of_encoding)
        : q(random_tensor<T>(s.queries, 1)), k(random_tensor<T>(s.keys, 2)), v(random_tensor<T>(s.values, 3)),
          given(random_tensor<T>({s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}, 4)),
          weights(random_tensor<T>({1, s.values.channels, 1, 3}, 5)), bias(random_tensor<T>({1, 1, 1, s.values.channels}, 6)),
          encoding(random_tensor<T>({batch_of_encoding, heads_of_encoding, s.keys.tokens, s.keys.channels}, 7)),
          input(random_tensor<T>({s.values.batch, s.values.heads, s.queries.tokens, s.values.channels}, 8)),
          scale(random_tensor<T>({1, 1, heads_of_scale, s.keys.channels}, 9)) {
        for (index_t b = 0; b < s.keys.batch; ++b) length.push_back(s.keys.tokens - 2 * b);
    }
    static std::span<T> numbers(tensor<T>& t) { return {t.data(), static_cast<std::size_t>(t.shape().size())}; }
    static std::span<const T> numbers(const tensor<T>& t) { return {t.data(), static_cast<std::size_t>(t.shape().size())}; }

    inputs<T> in() const { return {q, k, v}; }
    focused_linear_attention<pattern::lengths, T> op(int power) const {
        return {.power = power,
                .scale = numbers(scale),
                .convolution = {.weights = weights.view(), .bias = numbers(bias)},
                .pattern = {length},
                .positional_encoding = encoding.view(),
                .convolution_input = input.view(),
                .eps = 1e-2};
    }
};

/// Its gradients.
template <Scalar T>
struct focused_answer {
    tensor<T> q, k, v, weights, bias, encoding, input, scale;

    explicit focused_answer(const focused_call<T>& c)
        : q(c.q.shape()), k(c.k.shape()), v(c.v.shape()), weights(c.weights.shape()), bias(c.bias.shape()), encoding(c.encoding.shape()),
          input(c.input.shape()), scale(c.scale.shape()) {
        for (auto* t : each()) std::fill_n(t->data(), t->shape().size(), guard<T>);
    }
    std::array<tensor<T>*, 8> each() { return {&q, &k, &v, &weights, &bias, &encoding, &input, &scale}; }
    auto wanted() {
        gradients_of<focused_linear_attention<pattern::lengths, T>, T> all;
        all.queries = q, all.keys = k, all.values = v;
        all.positional_encoding = encoding;
        all.convolution = {input, weights, focused_call<T>::numbers(bias)};
        all.scale = focused_call<T>::numbers(scale);
        return all;
    }
};

template <Scalar T>
focused_answer<T> backward(const focused_call<T>& c, int power) {
    focused_answer<T> ours(c);
    const auto out = attend(c.op(power), c.q, c.k, c.v);
    attn::backward(c.op(power), c.in(), {out.view()}, {c.given}, ours.wanted());
    return ours;
}

} // namespace

TEST_CASE("focused_linear_attention: gradients are what finite differences say", "[linear][gradients][portable][arithmetic]") {
    struct sizes {
        int power;
        index_t heads, kv_heads, heads_of_scale, batch_of_encoding, heads_of_encoding;
    };
    for (const auto& [power, heads, kv_heads, heads_of_scale, batch_of_encoding, heads_of_encoding] :
         {sizes{1, 2, 2, 2, 1, 2}, sizes{3, 4, 2, 1, 2, 1}, sizes{2, 2, 1, 1, 1, 1}, sizes{4, 2, 2, 2, 2, 2}}) {
        INFO("power " << power << ", heads " << heads << " / " << kv_heads << ", scales of " << heads_of_scale);
        focused_call<double> c({{2, heads, 5, 3}, {2, kv_heads, 7, 3}, {2, kv_heads, 7, 2}}, heads_of_scale, batch_of_encoding, heads_of_encoding);
        auto ours = backward(c, power);
        const auto loss = [&](double& number, double value) {
            const auto held = std::exchange(number, value);
            const auto out = attend(c.op(power), c.q, c.k, c.v);
            number = held;
            return std::inner_product(out.data(), out.data() + out.shape().size(), c.given.data(), 0.0);
        };
        const std::array read{&c.q, &c.k, &c.v, &c.weights, &c.bias, &c.encoding, &c.input, &c.scale};
        for (std::size_t g = 0; g < read.size(); ++g) {
            INFO("gradient " << g);
            double largest = 0, error = 0;
            for (index_t e = 0; e < read[g]->shape().size(); ++e) {
                auto& x = read[g]->data()[e];
                constexpr double step = 1e-4; // the error is of the fourth power of it
                const auto slope = (8 * (loss(x, x + step) - loss(x, x - step)) - (loss(x, x + 2 * step) - loss(x, x - 2 * step))) / (12 * step);
                largest = std::max(largest, std::abs(slope));
                error = std::max(error, std::abs(slope - ours.each()[g]->data()[e]));
            }
            CHECK(largest > 1e-3);
            CHECK(error <= 1e-8 * (1 + largest));
        }
    }
}

TEST_CASE("focused_linear_attention: gradients that do not fit are refused", "[linear][gradients][portable]") {
    const focused_call<float> c({{1, 2, 4, 3}, {1, 2, 4, 3}, {1, 2, 4, 2}}, 2, 1, 1);
    focused_answer<float> ours(c);
    const auto out = attend(c.op(3), c.q, c.k, c.v);
    const auto refused = [&](const auto& op, const auto& wanted) { return error_of([&] { attn::backward(op, c.in(), {out}, {c.given}, wanted); }); };
    const auto op = c.op(3);
    auto wanted = ours.wanted();
    CHECK(refused(op, wanted) == nothing_thrown);
    wanted.scale = wanted.scale.first(5);
    check_says(refused(op, wanted), {"focused_linear_attention: wanted.scale has shape (1, 1, 1, 5)", "(1, 1, 1, 6)"});
    wanted.scale = {const_cast<float*>(c.scale.data()), 6};
    check_says(refused(op, wanted), {"focused_linear_attention: wanted.scale", "overlaps"});
    wanted.scale = {ours.q.data(), 6};
    check_says(refused(op, wanted), {"focused_linear_attention: wanted.scale", "overlaps wanted.queries"});

    const focused_linear_attention<pattern::lengths> bare{.pattern = {c.length}};
    const auto absent = [&](const auto& ask, const std::string& argument) {
        gradients_of<focused_linear_attention<pattern::lengths>, float> asked;
        ask(asked, ours.wanted());
        check_says(refused(bare, asked), {"focused_linear_attention: " + argument + " is asked for, but the operator has none"});
    };
    absent([](auto& asked, const auto& all) { asked.scale = all.scale; }, "wanted.scale");
    absent([](auto& asked, const auto& all) { asked.positional_encoding = all.positional_encoding; }, "wanted.positional_encoding");
    absent([](auto& asked, const auto& all) { asked.convolution.weights = all.convolution.weights; }, "wanted.convolution.weights");
    absent([](auto& asked, const auto& all) { asked.convolution.bias = all.convolution.bias; }, "wanted.convolution.bias");
    absent([](auto& asked, const auto& all) { asked.convolution.input = all.convolution.input; }, "wanted.convolution.input");
}

} // namespace attn::testing
