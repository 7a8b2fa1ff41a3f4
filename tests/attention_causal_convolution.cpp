// The causal convolution: what it is on numbers that one can add, one token at a time, what it refuses, and the definition of its gradient
// against finite differences. attn_random holds the library to its definitions, whole and in pieces.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/causal_backward.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/reference/causal_convolution.hpp>

#include <numeric>

namespace attn::testing {

namespace {

/// Tokens 1, 2, 3 ... of one channel.
tensor<float> counting(index_t n) {
    tensor<float> x({1, 1, n, 1});
    std::iota(x.data(), x.data() + n, 1.0F);
    return x;
}
std::vector<float> numbers_of(const tensor<float>& t) { return {t.data(), t.data() + t.shape().size()}; }

/// The sizes of a gradient, and what it has.
struct causal_sizes {
    index_t tokens, taps;
    bool has_state, has_bias;
};

} // namespace

TEST_CASE("causal_convolution: sums of the past, the state handed on", "[convolution][portable]") {
    const auto x = counting(5);
    const tensor<float> taps = [] {
        tensor<float> w({1, 1, 1, 3});
        std::iota(w.data(), w.data() + 3, 1.0F); // 1, 2, 3: the last is the token's own
        return w;
    }();
    const causal_convolution op{.weights = taps};
    CHECK(numbers_of(convolve(op, x)) == std::vector<float>{3, 8, 14, 20, 26});
    const std::vector<float> bias{100};
    CHECK(numbers_of(convolve(causal_convolution{.weights = taps, .bias = bias}, x)) == std::vector<float>{103, 108, 114, 120, 126});
    CHECK(numbers_of(convolve(causal_convolution{.weights = taps, .activation = relu{}}, x)) == std::vector<float>{3, 8, 14, 20, 26});

    tensor<float> state({1, 1, 2, 1}), out({1, 1, 1, 1});
    const causal_convolution streamed{.weights = taps, .first_state = state, .last_state = state};
    convolve(streamed, x.slice({.tokens = {0, 1}}), out);
    CHECK(numbers_of(out) == std::vector<float>{3});
    CHECK(numbers_of(state) == std::vector<float>{0, 1}); // what was there moves on
    tensor<float> rest({1, 1, 4, 1});
    convolve(streamed, x.slice({.tokens = {1, 4}}), rest);
    CHECK(numbers_of(rest) == std::vector<float>{8, 14, 20, 26});
    CHECK(numbers_of(state) == std::vector<float>{4, 5});
    convolve(streamed, x.slice({.tokens = {5, 0}}), rest.slice({.tokens = {0, 0}})); // no tokens
    CHECK(numbers_of(state) == std::vector<float>{4, 5});
}

TEST_CASE("causal_convolution: a token at a time costs no memory, and has the bits of the whole", "[convolution][portable]") {
    const shape s{2, 3, 700, 37}; // spans of tasks, and a part of a register
    const auto x = random_tensor<float>(s, 1), weights = random_tensor<float>({1, 3 * 37, 1, 4}, 2);
    const auto bias = random_tensor<float>({1, 1, 1, 3 * 37}, 3);
    const causal_convolution op{.weights = weights, .bias = std::span(bias.data(), 3 * 37), .activation = silu{}};
    tensor<float> whole(s), state({2, 3, 3, 37}), pieces(s), whole_state(state.shape());
    thread_pool pool(3);
    const auto with_state = [&](tensor<float>& held) {
        auto result = op;
        result.first_state = held, result.last_state = held;
        return result;
    };
    convolve(with_state(whole_state), x, whole, pool); // in place, with several tasks a sequence
    CHECK(allocations_in([&] {
              for (index_t i = 0; i < s.tokens; ++i) {
                  const tensor_part token{.tokens = {i, 1}};
                  convolve(with_state(state), x.slice(token), pieces.slice(token));
              }
          }) == 0);
    CHECK(same_bits(pieces, whole));
    CHECK(same_bits(state, whole_state));

    std::vector<float> by_tap(4 * 3 * 37); // [tap][channel]
    for (index_t c = 0; c < 3 * 37; ++c)
        for (index_t t = 0; t < 4; ++t) by_tap[static_cast<std::size_t>(t * 3 * 37 + c)] = weights(0, c, 0, t);
    auto other = op;
    other.weights = tensor_view<const float>(by_tap.data(), weights.shape(), {0, 1, 0, 3 * 37});
    CHECK(same_bits(convolve(other, x), convolve(op, x)));
}

TEST_CASE("causal_convolution: a result that is written past the caches has the same bits", "[convolution][portable]") {
    const shape s{1, 2, 520, 2051}; // 8 MB, and a part of a register
    const strides aligned{0, 520 * 2064, 2064, 1};
    const auto x = random_tensor<float>(s, 1), d_out = random_tensor<float>(s, 2), weights = random_tensor<float>({1, 2 * 2051, 1, 4}, 3);
    const causal_convolution op{.weights = weights};
    tensor<float> out(s), d_x(s), room({1, 2, 520, 2064});
    const tensor_view<float> streamed(room.data(), s, aligned);
    const auto same = [&](const tensor<float>& expected) {
        bool all = true;
        detail::for_each_number(s, [&](index_t b, index_t h, index_t i, index_t c) { all &= same_bits(expected(b, h, i, c), streamed(b, h, i, c)); });
        return all;
    };
    convolve(op, x, out);
    convolve(op, x, streamed, thread_pool(2));
    CHECK(same(out));
    backward(op, x, d_out, {.x = d_x});
    backward(op, x, d_out, {.x = streamed}, thread_pool(2));
    CHECK(same(d_x));
}

TEST_CASE("causal_convolution: NaN reaches what reads it, no other", "[convolution][portable]") {
    const shape s{2, 2, 50, 21};
    auto x = random_tensor<float>(s, 1);
    const auto weights = random_tensor<float>({1, 42, 1, 5}, 2);
    const causal_convolution op{.weights = weights, .activation = silu{}};
    const auto clean = convolve(op, x);
    x(1, 0, 20, 7) = std::numeric_limits<float>::quiet_NaN();
    const auto out = convolve(op, x);
    detail::for_each_number(s, [&](index_t b, index_t h, index_t i, index_t c) {
        if (b == 1 && h == 0 && c == 7 && i >= 20 && i < 25) CHECK(std::isnan(out(b, h, i, c)));
        else REQUIRE(same_bits(out(b, h, i, c), clean(b, h, i, c)));
    });
    tensor<float> d_x(s), d_clean(s);
    auto d_out = random_tensor<float>(s, 3);
    const causal_convolution plain{.weights = weights};
    backward(plain, x, d_out, {.x = d_clean});
    d_out(0, 1, 30, 4) = std::numeric_limits<float>::quiet_NaN();
    backward(plain, x, d_out, {.x = d_x});
    detail::for_each_number(s, [&](index_t b, index_t h, index_t i, index_t c) {
        if (b == 0 && h == 1 && c == 4 && i > 25 && i <= 30) CHECK(std::isnan(d_x(b, h, i, c)));
        else REQUIRE(same_bits(d_x(b, h, i, c), d_clean(b, h, i, c)));
    });
}

TEST_CASE("causal_convolution: what does not fit is refused, by name", "[convolution][portable]") {
    tensor<float> x({2, 3, 12, 4}), out(x.shape()), weights({1, 12, 1, 4}), state({2, 3, 3, 4}), state_after(state.shape());
    std::vector<float> bias(12);
    const causal_convolution<float> good{.weights = weights, .bias = bias};
    const auto refused = [&](const causal_convolution<float>& op, const tensor_view<const float>& from, const tensor_view<float>& to,
                             const std::vector<std::string>& parts) { check_says(error_of([&] { convolve(op, from, to); }), parts); };
    const auto with_weights = [&](const tensor<float>& w) { return causal_convolution<float>{.weights = w, .bias = bias}; };
    const auto with_states = [&](const tensor_view<const float>& before, const tensor_view<float>& after) {
        auto op = good;
        op.first_state = before, op.last_state = after;
        return op;
    };
    CHECK(error_of([&] { convolve(with_states(state, state_after), x, out); }) == nothing_thrown);
    CHECK(error_of([&] { convolve(with_states(state, state), x, out); }) == nothing_thrown);
    const tensor<float> per_head({1, 4, 1, 4}), one({1, 12, 1, 1}), nine({1, 12, 1, 9}), grid({1, 12, 2, 4});
    refused(with_weights(per_head), x, out, {"causal_convolution: weights has shape (1, 4, 1, 4), but (1, heads channels, 1, taps)", "(2, 3, 12, 4)"});
    refused(with_weights(grid), x, out, {"weights has shape (1, 12, 2, 4)"});
    refused(with_weights(one), x, out, {"weights has shape (1, 12, 1, 1), but 2 to 8 taps"});
    refused(with_weights(nine), x, out, {"weights has shape (1, 12, 1, 9), but 2 to 8 taps"});
    refused({}, x, out, {"weights has shape (0, 0, 0, 0)"});
    auto op = good;
    const std::vector<float> eleven(11);
    op.bias = eleven;
    refused(op, x, out, {"bias has 11 entries, but x has shape (2, 3, 12, 4)"});
    tensor<float> narrow({2, 3, 12, 3}), longer({2, 3, 4, 4});
    const auto rows = [](tensor<float>& of) { return of.slice({.tokens = {0, 3}}); };
    refused(good, x, narrow, {"out has shape (2, 3, 12, 3), but the result has (2, 3, 12, 4)"});
    refused(with_states(longer, {}), x, out, {"first_state has shape (2, 3, 4, 4), but (2, 3, 3, 4) is needed"});
    refused(with_states(head_major<float>(nullptr, {2, 3, 3, 4}), {}), x, out, {"first_state has shape (2, 3, 3, 4) but no memory"});
    refused(with_states({}, longer), x, out, {"last_state has shape (2, 3, 4, 4), but (2, 3, 3, 4) is needed"});
    refused(good, x, x, {"out of shape (2, 3, 12, 4) overlaps x"});
    refused(good, x, tensor_view<float>(out.data(), x.shape(), {0, 0, 4, 1}), {"out", "strides by which its elements overlap"});
    refused(with_states({}, rows(x)), x, out, {"last_state of shape (2, 3, 3, 4) overlaps x"});
    refused(with_states({}, rows(out)), x, out, {"out of shape (2, 3, 12, 4) overlaps last_state"});
    refused(with_states(rows(out), {}), x, out, {"out of shape (2, 3, 12, 4) overlaps first_state"});
    refused(with_states(state, tensor_view<float>(state.data() + 1, {2, 3, 3, 4}, {36, 12, 3, 1})), x, out, {"last_state"});
    refused(with_states(rows(longer), longer.slice({.tokens = {1, 3}})), x, out, {"last_state of shape (2, 3, 3, 4) overlaps first_state"});
    const std::vector<index_t> starts{0, 5, 13}, three{0, 5, 5, 12};
    tensor<float> all({1, 3, 12, 4}), all_out(all.shape());
    check_says(error_of([&] { convolve(good, ragged{starts}, all, all_out); }), {"causal_convolution: starts do not rise from 0 to 12"});
    check_says(error_of([&] { convolve(with_states(state, {}), ragged{three}, all, all_out); }), {"first_state has shape (2, 3, 3, 4), but (3, 3, 3, 4)"});
}

TEST_CASE("causal_convolution: the definition of its gradient against finite differences", "[convolution][portable]") {
    for (const auto& s : {causal_sizes{6, 4, true, true}, causal_sizes{2, 5, true, false}, causal_sizes{5, 2, false, true}, causal_sizes{0, 3, true, false}}) {
        INFO(s.tokens << " tokens, " << s.taps << " taps");
        const shape of_x{2, 2, s.tokens, 3}, of_state{2, 2, s.taps - 1, 3};
        auto x = random_tensor<double>(of_x, 1), state = random_tensor<double>(of_state, 2), weights = random_tensor<double>({1, 6, 1, s.taps}, 3),
             bias = random_tensor<double>({1, 1, 1, s.has_bias ? 6 : 0}, 4);
        const auto d_out = random_tensor<double>(of_x, 5), d_last = random_tensor<double>(of_state, 6);
        const auto biases = [&](auto& t) { return std::span(t.data(), static_cast<std::size_t>(t.shape().size())); };
        const auto first = [&] { return s.has_state ? std::as_const(state).view() : tensor_view<const double>(); };
        const auto loss = [&] {
            tensor<double> out(of_x), last(of_state);
            reference::causal_convolution<double, double>(x, first(), weights, biases(bias), silu{}, out, last);
            return std::inner_product(out.data(), out.data() + of_x.size(), d_out.data(), 0.0) +
                   std::inner_product(last.data(), last.data() + of_state.size(), d_last.data(), 0.0);
        };
        tensor<double> d_x(of_x), d_state(of_state), d_weights(weights.shape()), d_bias(bias.shape());
        reference::causal_convolution_backward<double, double>(x, first(), weights, biases(bias), silu{}, d_out, d_last, d_x, d_state, d_weights, biases(d_bias));
        const auto check = [&](tensor<double>& of, const tensor<double>& gradient) {
            for (index_t e = 0; e < of.shape().size(); ++e) {
                const auto held = of.data()[e], step = 1e-5;
                of.data()[e] = held + step;
                const auto above = loss();
                of.data()[e] = held - step;
                const auto below = loss();
                of.data()[e] = held;
                CHECK(std::abs((above - below) / (2 * step) - gradient.data()[e]) < 1e-8);
            }
        };
        check(x, d_x);
        if (s.has_state) check(state, d_state);
        check(weights, d_weights);
        check(bias, d_bias);
    }
}

TEST_CASE("causal_convolution: what is wrong with a gradient is refused, by name", "[convolution][portable]") {
    const tensor<float> x({2, 3, 12, 4}), d_out(x.shape()), weights({1, 12, 1, 4}), state({2, 3, 3, 4});
    tensor<float> d_x(x.shape()), d_weights(weights.shape()), d_state(state.shape());
    std::vector<float> bias(12), d_bias(12);
    const causal_convolution<float> op{.weights = weights, .bias = bias, .first_state = state};
    const auto refused = [&](const tensor_view<const float>& given, const causal_convolution_gradients<float>& wanted, const std::vector<std::string>& parts) {
        check_says(error_of([&] { backward(op, x, given, wanted); }), parts);
    };
    CHECK(error_of([&] { backward(op, x, d_out, {d_x, d_weights, d_bias, d_state, state}); }) == nothing_thrown);
    refused(state, {.x = d_x}, {"causal_convolution: d_out has shape (2, 3, 3, 4), but the result has (2, 3, 12, 4)"});
    refused(d_out, {.x = d_x, .d_last_state = x}, {"d_last_state has shape (2, 3, 12, 4), but (2, 3, 3, 4) is needed"});
    refused(d_out, {.x = d_state}, {"wanted.x", "(2, 3, 3, 4)", "(2, 3, 12, 4)"});
    refused(d_out, {.first_state = d_x}, {"wanted.first_state", "(2, 3, 12, 4)", "(2, 3, 3, 4)"});
    refused(d_out, {.weights = d_x}, {"wanted.weights", "(1, 12, 1, 4)"});
    refused(d_out, {.bias = std::span(d_bias).first(4)}, {"wanted.bias", "(1, 1, 1, 4)", "(1, 1, 1, 12)"});
    refused(d_out, {.x = head_major(const_cast<float*>(x.data()), x.shape())}, {"wanted.x", "overlaps x"});
    refused(d_out, {.first_state = head_major(const_cast<float*>(state.data()), state.shape())}, {"wanted.first_state", "overlaps first_state"});
    refused(d_out, {.x = d_x, .first_state = d_x.slice({.tokens = {0, 3}})}, {"wanted.first_state", "overlaps wanted.x"});
    check_says(error_of([&] { backward(causal_convolution<float>{.weights = weights}, x, d_out, {.bias = d_bias}); }),
               {"wanted.bias is asked for, but the convolution has no bias"});
    auto halves = op;
    halves.first_state = stored_view<const float>(state.data(), narrow_format::half, state.shape(), {36, 12, 4, 1});
    check_says(error_of([&] { backward(halves, x, d_out, {}); }), {"causal_convolution: first_state is stored in 16 bits"});
    sequential here;
    workspace memory(backward_workspace_bytes(op, x.shape(), here) - 1);
    check_says(error_of([&] { backward(op, x, d_out, {.x = d_x}, execution(here, memory)); }), {"causal_convolution: workspace has"});
}

} // namespace attn::testing
