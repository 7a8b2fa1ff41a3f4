// Talking-heads attention at the edges of arithmetic: the promises of softmax_promises.cpp, with each mixing of heads, both and none.
#include "promises.hpp"

#include <attn/attention/talking_heads_attention.hpp>
#include <attn/reference/talking_heads.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
using biased_talking_heads = talking_heads_attention<tiles, additive_bias<T>>;

template <Scalar T, class Op>
answer<T> talked(const Op& op, const given<T>& in) {
    return in_its_memory<T>(op, in, op.log_sum_exp_shape(shapes_of(inputs<T>(in))));
}
/// The definition in a precision.
template <Scalar T, Scalar U, class Op>
answer<T> talked_by_definition(const Op& op, const given<U>& in) {
    const auto s = shapes_of(inputs<U>(in));
    auto result = no_answer<T>(op.output_shape(s), op.log_sum_exp_shape(s));
    const auto call = [&](const auto& q, const auto& k, const auto& v) {
        reference::talking_heads<T>({q, k, v, in.positions}, result.out(), op.logits_mix, op.logits_bias, op.weights_mix, op.weights_bias,
                                    op.scale, op.score, op.pattern, op.sinks);
    };
    if constexpr (std::same_as<T, U>)
        call(in.queries, in.keys, in.values);
    else
        call(reference::widen(in.queries.view()), reference::widen(in.keys.view()), reference::widen(in.values.view()));
    return result;
}

/// Calls f(op) for the operator with each choice of mixings by the matrix, which is (1, 1, heads, heads).
template <class Op, class F>
void with_mixings(Op op, const tensor<double>& mix, F&& f) {
    for (const bool logits : {false, true})
        for (const bool weights : {false, true}) {
            INFO("mixes logits " << logits << ", weights " << weights);
            op.logits_mix = logits ? tensor_view<const double>(mix) : tensor_view<const double>();
            op.weights_mix = weights ? tensor_view<const double>(mix) : tensor_view<const double>();
            f(op);
        }
}
/// Calls check(op, answer) for the kernel's result and the definition's, with each choice of mixings that change nothing.
template <Scalar T, class Op, class F>
void for_each_talk(const Op& op, const given<T>& in, F&& check) {
    const auto heads = in.queries.shape().heads;
    tensor<double> identity({1, 1, heads, heads});
    for (index_t h = 0; h < heads; ++h) identity(0, 0, h, h) = 1;
    with_mixings(op, identity, [&](const Op& mixing) {
        {
            INFO("the kernel");
            check(mixing, talked(mixing, in));
        }
        INFO("the definition");
        check(mixing, talked_by_definition<T>(mixing, in));
    });
}

/// Two heads that hear each other, but themselves louder.
tensor<double> some_mixing() {
    auto mix = random_tensor<double>({1, 1, 2, 2}, 7, 0.25);
    mix(0, 0, 0, 0) = mix(0, 0, 1, 1) = 0.75;
    return mix;
}

} // namespace

TEMPLATE_TEST_CASE("talking heads: what a hidden key holds changes no bit of a row", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto mix = some_mixing();
    for (const index_t n : {1, 17, 50})
        for (const index_t m : {24, 150})
            for (const index_t value_dim : {0, 5, 33}) {
                const auto p = problem{1, 2, 1, n, m, 48, value_dim};
                const auto in = random_given<T>(p);
                auto bias = random_tensor<T>({1, 2, n, m}, 4);
                const index_t key = m / 3;
                const auto sees = [&](index_t i, index_t j) { return j != key || i % 3 == 1; };
                for (index_t i = 0; i < n; ++i)
                    if (!sees(i, key)) bias(0, 0, i, key) = bias(0, 1, i, key) = -infinite<T>;
                const auto compare = [&](const auto& op) {
                    const auto expected = talked(op, in);
                    for (const T held : {not_a_number<T>, infinite<T>, lowest<T>}) {
                        INFO(n << " queries, " << m << " keys, value_dim " << value_dim << ", hidden " << held);
                        auto other = random_given<T>(p);
                        std::fill_n(other.keys.view().row(0, 0, key), 48, held);
                        std::fill_n(other.values.view().row(0, 0, key), value_dim, held);
                        const auto out = talked(op, other);
                        for (index_t i = 0; i < n; ++i) {
                            CAPTURE(i);
                            if (!sees(i, key))
                                CHECK(same_row(out, expected, i));
                            else if (std::isnan(held))
                                CHECK((nan_row(out.values, i) && nan_row(out.log_sum_exp, i)));
                        }
                    }
                };
                with_mixings(biased_talking_heads<T>{.score = additive_bias(bias.view()), .pattern = everything(n, m)}, mix, compare);
                with_mixings(talking_heads_attention<tiles>{.pattern = mask(n, m, sees)}, mix, compare);
            }
}

TEMPLATE_TEST_CASE("talking heads: the lowest scores are scores, and sinks may have any value", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto nothing = -std::numeric_limits<double>::infinity();
    constexpr index_t heads = 3, n = 33, m = 90, half = m / 2;
    const auto in = random_given<T>({1, heads, 1, n, m, 3, 4});
    // Rows by turns: all keys are scored the lowest number, all but key 1, the first half while the others are hidden, none.
    auto bias = random_tensor<T>({1, 1, n, m}, 4);
    for (index_t i = 0; i < n; ++i)
        for (index_t j = 0; j < m; ++j) {
            const auto turn = i % 4;
            if (turn == 0 || (turn == 1 && j != 1) || (turn == 2 && j < half)) bias(0, 0, i, j) = lowest<T>;
            if (turn == 3 || (turn == 2 && j >= half)) bias(0, 0, i, j) = -infinite<T>;
        }
    const auto mean = [&](index_t end) {
        T sum = 0;
        for (index_t j = 0; j < end; ++j) sum += in.values(0, 0, j, 2) / static_cast<T>(end);
        return sum;
    };
    const std::array means{mean(m), in.values(0, 0, 1, 2), mean(half), T{0}};
    for (const auto& sinks : {std::array{nothing, nothing, nothing}, {-nothing, nothing, static_cast<double>(lowest<T>) / 2},
                              {nothing, std::numeric_limits<double>::quiet_NaN(), nothing}}) {
        const biased_talking_heads<T> op{.score = additive_bias(bias.view()), .pattern = everything(n, m), .sinks = sinks};
        for_each_talk(op, in, [&](const auto& mixing, const answer<T>& out) {
            const bool hears_nan = std::isnan(sinks[1]) && mixing.weights_mix.data(); // 0 times NaN
            for (index_t h = 0; h < heads; ++h)
                for (index_t i = 0; i < n; ++i) {
                    const auto sink = static_cast<T>(sinks[static_cast<std::size_t>(h)]);
                    const auto turn = i % 4;
                    CAPTURE(sink, i);
                    const T value = out.values(0, h, i, 2), log_sum_exp = out.log_sum_exp(0, h, i, 0);
                    const bool sunk = sink == infinite<T> || (sink > lowest<T> && turn != 1); // it takes all of the weight
                    if (std::isnan(sink))
                        CHECK(std::isnan(log_sum_exp));
                    else if (turn == 1 && !sunk)
                        CHECK(std::isfinite(log_sum_exp));
                    else
                        CHECK(log_sum_exp == (sunk || turn == 3 ? sink : lowest<T>));
                    if (turn == 3)
                        CHECK(value == 0); // nothing is seen
                    else if (std::isnan(sink) || hears_nan)
                        CHECK(std::isnan(value));
                    else
                        CHECK(is_close(value, sunk ? T{0} : means[static_cast<std::size_t>(turn)], static_cast<T>(32 * epsilon<T>)));
                }
        });
    }
}

TEMPLATE_TEST_CASE("talking heads: a mean of the largest values is finite", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr T large = -lowest<T> / 8 * 7;
    for (const index_t m : {3, 100}) {
        constexpr index_t n = 34;
        INFO(m << " keys");
        auto in = random_given<T>({1, 2, 2, n, m, 3, 5});
        for (index_t j = 0; j < m; ++j) in.values(0, 0, j, 0) = in.values(0, 1, j, 0) = 2;
        for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] /= 2;
        const auto sees_large = [](index_t i) { return i % 3 != 2; };
        const talking_heads_attention op{.pattern = mask(n, m, [&](index_t i, index_t j) { return sees_large(i) == (j < 2 * m / 3); })};
        const auto exact = talked_by_definition<double>(op, in);
        const auto small = talked(op, in);
        for (index_t h = 0; h < 2; ++h)
            for (index_t j = 0; j < 2 * m / 3; ++j)
                for (index_t c = 0; c < 5; ++c) in.values(0, h, j, c) *= large;
        const auto out = talked(op, in);
        for (index_t i = 0; i < n; ++i)
            for (index_t h = 0; h < 2; ++h)
                for (index_t c = 0; c < 5; ++c) {
                    CAPTURE(i, h, c);
                    const T value = out.values(0, h, i, c);
                    if (sees_large(i))
                        CHECK(is_close(value / large, static_cast<T>(exact.values(0, h, i, c)), static_cast<T>(32 * epsilon<T>)));
                    else
                        CHECK(same_bits(value, small.values(0, h, i, c)));
                }
    }
}

TEMPLATE_TEST_CASE("talking heads: scores of any size weigh what their differences say", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    tensor<double> swap({1, 1, 2, 2}); // exact too
    swap(0, 0, 0, 1) = swap(0, 0, 1, 0) = 1;
    const auto check_weights = [&](const auto& op, const given<T>& in) {
        with_mixings(op, swap, [&](const auto& mixing) {
            const auto ours = talked(mixing, in), textbook = talked_by_definition<T>(mixing, in);
            const auto exact = talked_by_definition<double>(mixing, in);
            CHECK(largest_error(ours.values, exact.values) <= 2 * largest_error(textbook.values, exact.values) + 8 * epsilon<T>);
            CHECK(largest_error(ours.log_sum_exp, exact.log_sum_exp) <= (8 + 2 * largest_magnitude(exact.log_sum_exp)) * epsilon<T>);
        });
    };
    for (const double offset : {0.0, 100.0, 1e4, 1e6, 1e9}) {
        if (4 * epsilon<T> * offset > 4) continue; // scores that are exact
        for (const index_t m : {4, 150}) {
            INFO("scores from " << offset << ", " << m << " keys");
            constexpr index_t n = 19;
            auto in = random_given<T>({1, 2, 1, n, m, 1, 3});
            for (index_t i = 0; i < n; ++i) in.queries(0, 0, i, 0) = in.queries(0, 1, i, 0) = static_cast<T>(i % 2 == 0 ? 1 : -1);
            for (index_t j = 0; j < m; ++j) in.keys(0, 0, j, 0) = static_cast<T>(offset + static_cast<double>(j * 7 % 4));
            const auto all = everything(n, m);
            const std::array sinks{offset + 2, offset};
            check_weights(talking_heads_attention{.scale = 1.0, .pattern = all}, in);
            check_weights(talking_heads_attention{.scale = 1.0, .pattern = all, .sinks = sinks}, in);

            tensor<T> bias({1, 1, n, m}); // or a bias makes them so large
            for (index_t e = 0; e < bias.shape().size(); ++e) bias.data()[e] = static_cast<T>(offset);
            for (index_t j = 0; j < m; ++j) in.keys(0, 0, j, 0) = static_cast<T>(j * 7 % 4);
            check_weights(biased_talking_heads<T>{.scale = 1.0, .score = additive_bias(bias.view()), .pattern = all}, in);
        }
    }
}

} // namespace attn::testing
