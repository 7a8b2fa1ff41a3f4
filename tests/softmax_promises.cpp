// Softmax attention at the edges of arithmetic and of its memory: which keys count, whatever others hold and however large scores are.
#include "promises.hpp"
#include "softmax_checks.hpp"

#include <attn/attention/merge.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
using biased_attention = softmax_attention<dense, additive_bias<T>>;
/// Two passes, whose results merge.
using passes_attention = softmax_attention<decltype(local{1, 0} | strided{4})>;

template <Scalar T, class Op>
answer<T> attended(const Op& op, const given<T>& in) {
    const auto& q = in.queries.shape();
    return in_its_memory<T>(op, in, {q.batch, q.heads, q.tokens, 1});
}
/// The definition in the same precision, which keeps the same promises.
template <Scalar T, class Op>
answer<T> defined(const Op& op, const given<T>& in) {
    auto result = no_answer<T>(op.output_shape(shapes_of(inputs<T>(in))), true);
    reference::softmax<T>(in, result.out(), op.scale, op.score, op.pattern, op.sinks);
    return result;
}
/// Calls check(answer) for the kernel's result and the definition's.
template <Scalar T, class Op, class F>
void for_both(const Op& op, const given<T>& in, F&& check) {
    {
        INFO("the kernel");
        check(attended(op, in));
    }
    INFO("the definition");
    check(defined(op, in));
}

template <Scalar T, class Op>
void check_close(const Op& op, const given<T>& in, double tolerance) {
    const auto ours = attended(op, in);
    const auto exact = exact_rows<T>(op, in);
    CHECK(largest_error(ours.values, exact.values) <= tolerance * epsilon<T>);
    CHECK(largest_error(ours.log_sum_exp, exact.log_sum_exp) <= tolerance * epsilon<T>);
}

/// The mean of the values of keys first .. end - 1, one channel.
template <Scalar T>
T mean_of(const given<T>& in, index_t head, index_t channel, index_t first, index_t end) {
    long double sum = 0;
    for (index_t j = first; j < end; ++j) sum += static_cast<long double>(in.values(0, head, j, channel)) / static_cast<long double>(end - first);
    return static_cast<T>(sum);
}

} // namespace

TEMPLATE_TEST_CASE("softmax: biases of many keys stay in the workspace, whatever number of queries is left over", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto& [n, m] : {std::pair<index_t, index_t>{1, 100}, {1, 273}, {1, 300}, {1, 768}, {1, 769}, {1, 1500}, {2, 2100}, {3, 700},
                               {5, 700}, {9, 400}, {9, 1537}, {17, 272}, {17, 700}, {25, 350}, {33, 350}, {49, 260}}) {
        const auto in = random_given<T>({1, 2, 1, n, m, 5, 4});
        for (const index_t heads : {1, 2}) { // the same bias for both, or another
            INFO(n << " queries, " << m << " keys, " << heads << " biases");
            const auto bias = hiding_bias<T>({1, heads, n, m}, 5);
            check_close<T>(biased_attention<T>{.score = additive_bias(bias.view())}, in, 64);
        }
    }
}

TEMPLATE_TEST_CASE("softmax: what a hidden key holds changes no bit of a row", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t n : {1, 5, 16, 17, 49})
        for (const index_t m : {24, 150})
            for (const index_t key_dim : {3, 48, 65})
                for (const index_t value_dim : {0, 5, 33}) {
                    auto in = random_given<T>({1, 2, 1, n, m, key_dim, value_dim});
                    for (index_t e = 0; e < in.keys.shape().size(); ++e) in.keys.data()[e] *= 20; // scores far apart
                    auto bias = random_tensor<T>({1, 2, n, m}, 4);
                    const index_t key = m / 3;
                    const auto sees = [&](index_t i, index_t j) { return j != key || i % 3 == 1; };
                    for (index_t i = 0; i < n; ++i)
                        if (!sees(i, key)) bias(0, 0, i, key) = bias(0, 1, i, key) = -infinite<T>;
                    const biased_attention<T> by_bias{.score = additive_bias(bias.view())};
                    const softmax_attention by_pattern{.pattern = mask(n, m, sees)};
                    const auto with_bias = attended(by_bias, in), with_pattern = attended(by_pattern, in);
                    for (const T held : {not_a_number<T>, infinite<T>, lowest<T>}) {
                        INFO(n << " queries, " << m << " keys, key_dim " << key_dim << ", value_dim " << value_dim << ", hidden " << held);
                        auto other = random_given<T>({1, 2, 1, n, m, key_dim, value_dim});
                        std::copy_n(in.keys.data(), in.keys.shape().size(), other.keys.data());
                        std::fill_n(other.keys.view().row(0, 0, key), key_dim, held);
                        std::fill_n(other.values.view().row(0, 0, key), value_dim, held);
                        const auto other_bias = attended(by_bias, other), other_pattern = attended(by_pattern, other);
                        for (index_t i = 0; i < n; ++i) {
                            CAPTURE(i);
                            if (!sees(i, key)) {
                                CHECK(same_row(other_bias, with_bias, i));
                                CHECK(same_row(other_pattern, with_pattern, i));
                            } else if (std::isnan(held)) {
                                CHECK((nan_row(other_bias.values, i) && nan_row(other_bias.log_sum_exp, i)));
                                CHECK((nan_row(other_pattern.values, i) && nan_row(other_pattern.log_sum_exp, i)));
                            }
                        }
                    }
                }
}

TEMPLATE_TEST_CASE("softmax: few rows, of which a register has several keys, have the bits of many", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto check = [](const auto& op, const given<T>& all, index_t n, index_t m) {
        const auto last = [n](const tensor<T>& rows, index_t count) { return rows_of(rows, n - count, count); };
        const auto exact = attended(op, all);
        for (const index_t count : {1, 2, 4}) {
            CAPTURE(count);
            const auto few = attended(op, given<T>{last(all.queries, count), rows_of(all.keys, 0, m), rows_of(all.values, 0, m), bottom_right(count, m)});
            CHECK(same_bits(few, {last(exact.values, count), last(exact.log_sum_exp, count)}));
        }
    };
    constexpr index_t n = 40;
    for (const index_t heads : {1, 2, 3, 5, 8})
        for (const index_t m : {n, index_t{47}, index_t{128}, index_t{129}, index_t{300}}) {
            INFO(heads << " heads of one key head, " << m << " keys");
            const auto s = shape{.heads = heads, .tokens = n, .channels = 7};
            given<T> all{random_tensor<T>(s, 1), random_tensor<T>({1, 1, m, 7}, 2), random_tensor<T>({1, 1, m, 5}, 3), bottom_right(n, m)};
            check(softmax_attention{}, all, n, m);
            all.keys(0, 0, m - 9, 0) = all.keys(0, 0, m - 5, 3) = -infinite<T>; // a score of -infinity, infinity or NaN
            for (const T held : {T{1}, infinite<T>, not_a_number<T>}) {
                all.values(0, 0, m - 7, 2) = held;
                check(softmax_attention{.pattern = causal{}}, all, n, m);
                check(softmax_attention{.pattern = local{6, 0}}, all, n, m);
            }
        }
}

TEMPLATE_TEST_CASE("softmax: NaN in a key that is seen is NaN in the row, whatever its bits", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    for (const bits payload : {bits{0}, bits{1}, bits{0x81}, bits{0x1ff}, bits{0x2aaaa}})
        for (const bool negative : {false, true}) {
            const auto sign = bits{negative} << (8 * sizeof(T) - 1);
            const T nan = std::bit_cast<T>(static_cast<bits>(std::bit_cast<bits>(not_a_number<T>) | payload | sign));
            auto in = random_given<T>({1, 1, 1, 18, 30, 4, 5});
            in.keys(0, 0, 11, 2) = nan;
            const auto out = attended(softmax_attention{.pattern = mask(18, 30, [](index_t i, index_t j) { return j != 11 || i % 2 == 0; })}, in);
            for (index_t i = 0; i < 18; ++i) CHECK((nan_row(out.values, i) && nan_row(out.log_sum_exp, i)) == (i % 2 == 0));
        }
}

TEMPLATE_TEST_CASE("softmax: the lowest scores are scores", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t n : {1, 5, 17, 34})
        for (const index_t m : {6, 40, 300}) {
            INFO(n << " queries, " << m << " keys");
            const auto in = random_given<T>({1, 2, 2, n, m, 3, 4});
            // Rows by turns: all keys are scored the lowest number, all but key 1, the first half while the others are hidden, none.
            const auto half = m / 2;
            auto bias = random_tensor<T>({1, 2, n, m}, 4);
            for (index_t h = 0; h < 2; ++h)
                for (index_t i = 0; i < n; ++i)
                    for (index_t j = 0; j < m; ++j) {
                        const auto turn = i % 4;
                        if (turn == 0 || (turn == 1 && j != 1) || (turn == 2 && j < half)) bias(0, h, i, j) = lowest<T>;
                        if (turn == 3 || (turn == 2 && j >= half)) bias(0, h, i, j) = -infinite<T>;
                    }
            const auto check_rows = [&](const answer<T>& out) {
                for (index_t h = 0; h < 2; ++h)
                    for (index_t i = 0; i < n; ++i)
                        for (index_t c = 0; c < 4; ++c) {
                            CAPTURE(i);
                            const std::array expected{mean_of(in, h, c, 0, m), in.values(0, h, 1, c), mean_of(in, h, c, 0, half), T{0}};
                            CHECK(is_close(out.values(0, h, i, c), expected[static_cast<std::size_t>(i % 4)], static_cast<T>(16 * epsilon<T>)));
                            if (i % 4 == 3) CHECK(out.log_sum_exp(0, h, i, 0) == -infinite<T>);
                            if (i % 2 == 0) CHECK(out.log_sum_exp(0, h, i, 0) == lowest<T>);
                        }
            };
            for_both(biased_attention<T>{.score = additive_bias(bias.view())}, in, check_rows);

            for (const T score : {lowest<T>, lowest<T> / 2, static_cast<T>(-1e30), -lowest<T>}) {
                CAPTURE(score);
                for_both(softmax_attention<dense, constant_score<T>>{.score = {score}}, in, [&](const answer<T>& out) {
                    for (index_t i = 0; i < n; ++i) {
                        CHECK(is_close(out.values(0, 1, i, 2), mean_of(in, 1, 2, 0, m), static_cast<T>(16 * epsilon<T>)));
                        CHECK(out.log_sum_exp(0, 1, i, 0) == score);
                    }
                });
            }
        }
}

TEMPLATE_TEST_CASE("softmax: sinks of any value", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr std::array sinks{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN(), static_cast<double>(lowest<T>), 1.5};
    constexpr index_t heads = 5, plain = 1; // the second head's sink adds nothing
    const auto check_rows = [&](const answer<T>& out, const given<T>& in, const auto& sees_any) {
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < in.queries.shape().tokens; ++i) {
                const auto sink = static_cast<T>(sinks[static_cast<std::size_t>(h)]);
                CAPTURE(sink, i);
                const T value = out.values(0, h, i, 1), log_sum_exp = out.log_sum_exp(0, h, i, 0);
                if (!sees_any(i)) {
                    CHECK(value == 0);
                    CHECK((std::isnan(sink) ? std::isnan(log_sum_exp) : log_sum_exp == sink));
                } else if (std::isnan(sink)) {
                    CHECK((std::isnan(value) && std::isnan(log_sum_exp)));
                } else if (sink == infinite<T>) {
                    CHECK((value == 0 && log_sum_exp == sink));
                } else if (h != heads - 1) {
                    CHECK((value == out.values(0, plain, i, 1) && log_sum_exp == out.log_sum_exp(0, plain, i, 0)));
                } else {
                    CHECK(log_sum_exp > std::max(sink, out.log_sum_exp(0, plain, i, 0)));
                    CHECK(std::abs(value) < std::abs(out.values(0, plain, i, 1)));
                }
            }
    };
    for (const index_t n : {1, 5, 17, 34}) {
        INFO(n << " queries");
        auto in = random_given<T>({1, heads, 1, n, 20, 3, 4});
        for (index_t h = 1; h < heads; ++h) std::copy_n(in.queries.data(), n * 3, in.queries.view().row(0, h, 0)); // all heads are the same
        const auto some = [](index_t i) { return i % 3 != 2; };
        const softmax_attention op{.pattern = mask(n, 20, [&](index_t i, index_t) { return some(i); }), .sinks = sinks};
        for_both(op, in, [&](const answer<T>& out) { check_rows(out, in, some); });

        in.positions = {.first_key = 9}; // the first queries see no key, the next only in one of the passes
        const passes_attention passes{.pattern = local{1, 0} | strided{4}, .sinks = sinks};
        const auto strided_or_local = [](index_t i) {
            for (index_t j = 9; j < 29; ++j)
                if ((local{1, 0} | strided{4}).visible(i, j)) return true;
            return false;
        };
        for_both(passes, in, [&](const answer<T>& out) { check_rows(out, in, strided_or_local); });
    }
}

TEMPLATE_TEST_CASE("merge: a sink of infinity takes all of the weight, on either side", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::array sinks{std::numeric_limits<double>::infinity()};
    const auto in = random_given<T>({1, 1, 1, 3, 6, 2, 2}), more = random_given<T>({1, 1, 1, 3, 6, 2, 2}, 8);
    const auto pattern = everything(3, 6);
    for (const bool first : {false, true}) {
        auto sunk = attended(softmax_attention{.pattern = pattern, .sinks = sinks}, in);
        auto other = attended(softmax_attention{.pattern = pattern}, more);
        auto& into = first ? sunk : other;
        attn::merge(into.out(), first ? other.out() : sunk.out());
        for (index_t i = 0; i < 3; ++i) {
            CHECK((into.values(0, 0, i, 0) == 0 && into.values(0, 0, i, 1) == 0));
            CHECK(into.log_sum_exp(0, 0, i, 0) == infinite<T>);
        }
    }
}

TEMPLATE_TEST_CASE("softmax: a mean of the largest values is finite, and rows of other values do not notice", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr T large = -lowest<T> / 8 * 7;
    const auto check_rows = [](const auto& op, const given<T>& in, const answer<T>& small, const answer<double>& exact, const auto& sees_large) {
        const auto out = attended(op, in);
        for (index_t i = 0; i < in.queries.shape().tokens; ++i) {
            CAPTURE(i);
            if (sees_large(i))
                for (index_t c = 0; c < in.values.shape().channels; ++c)
                    CHECK(is_close(out.values(0, 0, i, c) / large, static_cast<T>(exact.values(0, 0, i, c)), static_cast<T>(32 * epsilon<T>)));
            else
                CHECK(same_row(out, small, i));
        }
    };
    for (const index_t n : {1, 4, 17, 34})
        for (const index_t m : {3, 48, 300})
            for (const index_t value_dim : {5, 16}) {
                INFO(n << " queries, " << m << " keys, value_dim " << value_dim);
                // The first two thirds of the keys have large values, of one sign in the first channel; every third row sees the others only.
                const auto large_keys = m * 2 / 3;
                auto in = random_given<T>({1, 1, 1, n, m, 3, value_dim});
                for (index_t j = 0; j < m; ++j) in.values(0, 0, j, 0) = 1;
                for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] /= 2;
                const auto sees_large = [](index_t i) { return i % 3 != 2; };
                const softmax_attention by_pattern{.pattern = mask(n, m, [&](index_t i, index_t j) { return sees_large(i) == (j < large_keys); })};
                auto bias = random_tensor<T>({1, 1, n, m}, 4);
                for (index_t i = 0; i < n; ++i)
                    for (index_t j = 0; j < m; ++j)
                        if (sees_large(i) != (j < large_keys)) bias(0, 0, i, j) = -infinite<T>;
                const biased_attention<T> by_bias{.score = additive_bias(bias.view())};
                const auto few = attended(by_pattern, in), few_biased = attended(by_bias, in);
                const auto exact = exact_rows<T>(by_pattern, in), exact_biased = exact_rows<T>(by_bias, in);
                for (index_t j = 0; j < large_keys; ++j)
                    for (index_t c = 0; c < value_dim; ++c) in.values(0, 0, j, c) *= large;
                check_rows(by_pattern, in, few, exact, sees_large);
                check_rows(by_bias, in, few_biased, exact_biased, sees_large);
            }

    auto in = random_given<T>({1, 1, 1, 18, 50, 3, 5});
    for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] = in.values.data()[e] / 16 + T{0.8125};
    const passes_attention passes{.pattern = local{1, 0} | strided{4}};
    const auto exact = exact_rows<T>(passes, in);
    for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] *= large;
    check_rows(passes, in, {}, exact, [](index_t) { return true; });
}

TEMPLATE_TEST_CASE("softmax: scores of any size weigh what their differences say", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto check_weights = [](const auto& op, const given<T>& in) {
        const auto ours = attended(op, in), textbook = defined(op, in);
        const auto exact = exact_rows<T>(op, in);
        const auto size = largest_magnitude(exact.log_sum_exp);
        CHECK(largest_error(ours.values, exact.values) <= 2 * largest_error(textbook.values, exact.values) + 8 * epsilon<T>);
        // In double the definition rounds as often as it adds.
        const auto own = std::same_as<T, double> ? static_cast<double>(in.keys.shape().tokens) / 2 : 0;
        CHECK(largest_error(ours.log_sum_exp, exact.log_sum_exp) <= (8 + 2 * size + own) * epsilon<T>);
    };
    for (const double offset : {0.0, 100.0, 1e4, 1e6, 8e6, 1e9}) {
        if (4 * epsilon<T> * offset > 4) continue; // scores that are exact
        for (const index_t n : {1, 6, 17, 34})
            for (const index_t m : {4, 200, 300}) {
                INFO("scores from " << offset << ", " << n << " queries, " << m << " keys");
                auto in = random_given<T>({1, 1, 1, n, m, 1, 3});
                for (index_t i = 0; i < n; ++i) in.queries(0, 0, i, 0) = static_cast<T>(i % 2 == 0 ? 1 : -1);
                for (index_t j = 0; j < m; ++j) in.keys(0, 0, j, 0) = static_cast<T>(offset + static_cast<double>(j * 7 % 4));
                const auto all = everything(n, m);
                check_weights(softmax_attention{.scale = 1.0, .pattern = all}, in);
                const std::array sinks{offset + 2};
                check_weights(softmax_attention{.scale = 1.0, .pattern = all, .sinks = sinks}, in);
                check_weights(passes_attention{.scale = 1.0, .pattern = local{1, 0} | strided{4}, .sinks = sinks}, in);

                tensor<T> bias({1, 1, n, m}); // or a bias makes them so large
                for (index_t e = 0; e < bias.shape().size(); ++e) bias.data()[e] = static_cast<T>(offset);
                for (index_t j = 0; j < m; ++j) in.keys(0, 0, j, 0) = static_cast<T>(j * 7 % 4);
                check_weights(biased_attention<T>{.scale = 1.0, .score = additive_bias(bias.view())}, in);
            }
    }
}

} // namespace attn::testing
