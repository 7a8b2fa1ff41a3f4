// batch_norm, rep_batch_norm and progressive_rep_batch_norm: inference and training against their definitions.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/batch_norm.hpp>
#include <attn/norm/recalibration.hpp>
#include <attn/norm/rms_norm.hpp>

namespace attn::testing {

namespace {

template <class N, class... Gamma>
auto trained(const N& norm, const tensor<typename N::scalar>& x, batch_norm_statistics& statistics, const token_mask& mask = {}, Gamma... gamma) {
    sequential here;
    workspace memory(training_workspace_bytes(norm, x.shape()));
    auto result = no_answer<typename N::scalar>(x.shape(), false);
    train(norm, x, result.values, statistics, gamma..., execution(here, memory), mask);
    return std::move(result.values);
}

/// Epsilons of a result of training: in double, most is the reference's own rounding, of long sums far from 0.
template <Scalar T>
constexpr double rounding = (std::same_as<T, double> ? 2000 : 64) * epsilon<T>;

/// What training must give: the definition in double.
template <Scalar T>
tensor<double> exact_training(const tensor<T>& x, const token_mask& mask, std::span<const T> weight, std::span<const T> bias, double eta) {
    const std::vector<double> w(weight.begin(), weight.end()), b(bias.begin(), bias.end());
    return exact_rows(x, [&](const auto& from, const auto& to) {
        const reference::channel_statistics<double> seen(from, mask);
        reference::rep_batch_norm<double>(from, to, seen.mean, seen.variance, w, b, eta, 1e-5, mask);
    });
}

tensor<bool> random_mask(const shape& s, unsigned seed) {
    std::mt19937 random(seed);
    tensor<bool> mask(s);
    std::generate_n(mask.data(), s.size(), [&] { return random() % 3 != 0; });
    return mask;
}

double largest_error_of(const std::vector<double>& a, const std::vector<double>& b) {
    double worst = 0;
    for (std::size_t c = 0; c < b.size(); ++c) worst = std::max(worst, std::abs(a.at(c) - b[c]));
    return worst;
}

} // namespace

TEMPLATE_TEST_CASE("batch_norm and rep_batch_norm: inference is the definition, at any size and offset", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const auto channels : edge_sizes)
        for (const double offset : {0.0, 1e6}) {
            INFO(channels << " channels, offset " << offset);
            const auto x = random_rows<TestType>({2, 1, 5, channels}, 1, offset);
            const auto w = random_numbers<TestType>(channels, 2, 1), b = random_numbers<TestType>(channels, 3);
            const auto mean = random_numbers<double>(channels, 4, offset);
            std::vector<double> variance(static_cast<std::size_t>(channels), 0.8);
            const auto wide_w = widened(w), wide_b = widened(b);
            const batch_norm<TestType> norm{w, b, mean, variance, 1e-3};
            for (const double eta : {0.0, 1.0, -0.6}) {
                const auto exact = exact_rows(x, [&](const auto& from, const auto& to) {
                    reference::rep_batch_norm<double>(from, to, mean, variance, wide_w, wide_b, eta, 1e-3);
                });
                const auto ours = eta == 0 ? normalise(norm, x) : normalise(rep_batch_norm<TestType>{norm, eta}, x);
                CHECK(largest_error(ours, exact) <= (eta == 0 ? 40 : 4 * std::max(10.0, std::abs(offset))) * epsilon<TestType>);
            }
        }
}

TEMPLATE_TEST_CASE("batch_norm: if asked, by the statistics of the input, a single token too", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const auto& s : {shape{2, 2, 40, 19}, shape{1, 1, 700, 64}, shape{1, 1, 1, 5}, shape{1, 1, 2, 1}}) {
        const auto x = random_rows<TestType>(s, 3, 10);
        const auto exact = exact_training<TestType>(x, {}, {}, {}, 0);
        CHECK(largest_error(normalise(batch_norm<TestType>{.batch_statistics = true}, x), exact) <= rounding<TestType>);
    }
}

TEMPLATE_TEST_CASE("batch_norm: NaN stays where it is in inference, and in its channel in training", "[norm][portable]", ATTN_TEST_NUMBERS) {
    auto x = random_rows<TestType>({1, 1, 50, 21}, 3);
    const auto clean = normalise(batch_norm<TestType>{.batch_statistics = true}, x);
    x(0, 0, 33, 4) = std::numeric_limits<TestType>::quiet_NaN();
    const auto spoilt = normalise(batch_norm<TestType>{.batch_statistics = true}, x);
    const std::vector<double> mean(21), variance(21, 1.0);
    const auto fixed = normalise(batch_norm<TestType>{.mean = mean, .variance = variance}, x);
    for (index_t i = 0; i < 50; ++i)
        for (index_t c = 0; c < 21; ++c) {
            const bool right = c == 4 ? std::isnan(spoilt(0, 0, i, c)) : same_bits(spoilt(0, 0, i, c), clean(0, 0, i, c));
            if (!right || std::isnan(fixed(0, 0, i, c)) != (i == 33 && c == 4)) FAIL("row " << i << ", channel " << c);
        }
}

TEMPLATE_TEST_CASE("training: output and running statistics after n steps are the definition's", "[norm][portable][arithmetic]", ATTN_TEST_NUMBERS) {
    for (const auto& s : {shape{2, 3, 7, 5}, shape{1, 1, 2, 17}, shape{4, 1, 197, 33}, shape{1, 2, 600, 64}})
        for (const auto momentum : {std::optional(0.1), std::optional(1.0), std::optional<double>()})
            for (const int masked : {0, 1, 2}) {
                INFO(to_string(s) << ", mask " << masked);
                const auto w = random_numbers<TestType>(s.channels, 2, 1), b = random_numbers<TestType>(s.channels, 3);
                const batch_norm<TestType> norm{.weight = w, .bias = b, .momentum = momentum};
                auto mask = random_mask({s.batch, masked == 2 ? 1 : s.heads, s.tokens, 1}, 7);
                mask.data()[0] = mask.data()[1] = true;
                const token_mask seen_mask = masked ? mask.view() : token_mask{};
                batch_norm_statistics statistics(s.channels), rep_statistics(s.channels);
                std::vector<double> mean(statistics.mean), variance(statistics.variance);
                for (int step = 0; step < 5; ++step) {
                    const auto x = random_rows<TestType>(s, static_cast<unsigned>(step), 3 + step, 1 + step);
                    const auto y = trained(norm, x, statistics, seen_mask);
                    CHECK(largest_error(y, exact_training<TestType>(x, seen_mask, w, b, 0)) <= rounding<TestType>);
                    const auto rep = trained(rep_batch_norm<TestType>{norm, 0.4}, x, rep_statistics, seen_mask);
                    CHECK(largest_error(rep, exact_training<TestType>(x, seen_mask, w, b, 0.4)) <= rounding<TestType>);
                    const auto wide = reference::widen(x.view());
                    const reference::channel_statistics<double> exact(wide.view(), seen_mask);
                    const auto part = momentum.value_or(1.0 / (step + 1));
                    for (std::size_t c = 0; c < mean.size(); ++c) {
                        mean[c] = (1 - part) * mean[c] + part * exact.mean[c];
                        variance[c] = (1 - part) * variance[c] + part * exact.unbiased_variance(c);
                    }
                }
                CHECK(statistics.batches == 5);
                CHECK(largest_error_of(statistics.mean, mean) <= rounding<TestType>);
                CHECK(largest_error_of(statistics.variance, variance) <= 2 * rounding<TestType>);
                CHECK(statistics.mean == rep_statistics.mean);
                // What training has learnt is what inference uses.
                const auto x = random_rows<TestType>(s, 20);
                const auto wide_w = widened(w), wide_b = widened(b);
                const auto exact = exact_rows(x, [&](const auto& from, const auto& to) {
                    reference::rep_batch_norm<double>(from, to, statistics.mean, statistics.variance, wide_w, wide_b, 0, 1e-5);
                });
                auto learnt = norm;
                learnt.mean = statistics.mean;
                learnt.variance = statistics.variance;
                CHECK(largest_error(normalise(learnt, x), exact) <= rounding<TestType>);
            }
}

TEMPLATE_TEST_CASE("training: a hidden token may hold anything", "[norm][portable]", ATTN_TEST_NUMBERS) {
    auto x = random_rows<TestType>({1, 1, 80, 9}, 3);
    auto mask = random_mask({1, 1, 80, 1}, 4);
    mask.data()[5] = false;
    batch_norm_statistics a(9), b(9);
    const auto clean = trained(rep_batch_norm<TestType>{}, x, a, mask.view());
    for (index_t c = 0; c < 9; ++c) CHECK(clean(0, 0, 5, c) == 2 * x(0, 0, 5, c));
    std::fill_n(x.data() + 5 * 9, 9, std::numeric_limits<TestType>::quiet_NaN());
    const auto with_nan = trained(rep_batch_norm<TestType>{}, x, b, mask.view());
    CHECK(a.mean == b.mean);
    CHECK(a.variance == b.variance);
    for (index_t i = 0; i < 80; ++i) CHECK(std::isnan(with_nan(0, 0, i, 0)) == (i == 5));
}

TEMPLATE_TEST_CASE("training: statistics of large offsets, of an outlier in front, and of squares that overflow", "[norm][portable]", ATTN_TEST_NUMBERS) {
    auto x = random_rows<TestType>({1, 1, 3000, 3}, 3, 1e6);
    x(0, 0, 0, 1) = 0;
    for (index_t i = 0; i < 3000; ++i) x(0, 0, i, 2) *= static_cast<TestType>(std::same_as<TestType, float> ? 1e24 : 1e100);
    const auto wide = reference::widen(x.view());
    const reference::channel_statistics<double> exact(wide.view());
    batch_norm_statistics statistics(3);
    trained(batch_norm<TestType>{.momentum = 1}, x, statistics);
    for (std::size_t c = 0; c < 3; ++c) {
        CHECK(std::abs(statistics.mean[c] / exact.mean[c] - 1) <= rounding<TestType> / 16);
        CHECK(std::abs(statistics.variance[c] / exact.unbiased_variance(c) - 1) <= 64 * epsilon<float>);
    }
}

// As a class token is, in front of each sequence: two passes in the same precision are wrong by 1e-6 at most.
TEMPLATE_TEST_CASE("training: statistics where the first of the tokens taken together lies far from the others", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const index_t tokens : {33, 64, 700})
        for (const double first : {3.0, 30.0, 1000.0, 1e6}) {
            INFO(tokens << " tokens, the first about " << first);
            auto x = random_rows<TestType>({1, 1, tokens, 19}, 3, 0);
            for (index_t i = 0; i < tokens; i += 32)
                for (index_t c = 0; c < 19; ++c) x(0, 0, i, c) += static_cast<TestType>(first);
            const auto wide = reference::widen(x.view());
            const reference::channel_statistics<double> exact(wide.view());
            batch_norm_statistics statistics(19);
            trained(batch_norm<TestType>{.momentum = 1}, x, statistics);
            for (std::size_t c = 0; c < 19; ++c) {
                CHECK(std::abs(statistics.mean[c] - exact.mean[c]) <= 4 * epsilon<TestType> * std::sqrt(exact.unbiased_variance(c)));
                CHECK(std::abs(statistics.variance[c] / exact.unbiased_variance(c) - 1) <= 32 * epsilon<TestType>); // the definition rounds as well
            }
        }
}

TEST_CASE("training: a million tokens in small steps lose no digits", "[norm][arithmetic]") {
    // Every batch has the mean 1000 + 1/1024 and the biased variance 1: the running ones end there.
    tensor<float> x({1, 1, 100, 2});
    for (index_t i = 0; i < 200; ++i) x.data()[i] = 1000 + 1.0F / 1024 + (i / 2 % 2 == 0 ? 1.0F : -1.0F);
    batch_norm_statistics average(2), moving(2);
    recalibration all(2);
    sequential here;
    workspace memory(recalibration::workspace_bytes<float>(x.shape()));
    for (int step = 0; step < 10000; ++step) {
        trained(batch_norm<float>{.momentum = {}}, x, average);
        trained(batch_norm<float>{.momentum = 0.01}, x, moving);
        all.add<float>(x, execution(here, memory));
    }
    const double mean = 1000 + 1.0 / 1024;
    CHECK(all.tokens() == 1000000);
    CHECK(std::abs(average.mean[1] - mean) <= 1e-10);
    CHECK(std::abs(average.variance[1] - 100.0 / 99) <= 1e-12);
    CHECK(std::abs(moving.mean[0] - mean) <= 1e-9);
    CHECK(std::abs(all.statistics().mean[0] - mean) <= 1e-10);
    CHECK(std::abs(all.statistics().variance[0] - 1e6 / (1e6 - 1)) <= 1e-10);
}

TEMPLATE_TEST_CASE("training: the same bits for any executor and layout, and nothing allocated", "[norm][portable][parallel]", ATTN_TEST_NUMBERS) {
    const shape s{2, 3, 250, 37};
    const auto x = random_rows<TestType>(s, 2);
    const auto mask = random_mask({2, 1, 250, 1}, 3);
    const progressive_rep_batch_norm<layer_norm<TestType>> norm{{}, {{}, 0.5}};
    batch_norm_statistics expected_statistics(37);
    const auto expected = trained(norm, x, expected_statistics, mask.view(), std::optional(0.3));
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        workspace memory(training_workspace_bytes(norm, s, executor));
        for (const auto l : row_layouts) {
            placed<TestType> in(x, l), out(s, l);
            batch_norm_statistics statistics(37);
            train(norm, in.view(), out.view(), statistics, 0.3, execution(executor, memory), mask.view());
            CHECK(same_bits(out.copy(), expected));
            CHECK(out.guards_intact());
            CHECK(statistics.mean == expected_statistics.mean);
            CHECK(statistics.variance == expected_statistics.variance);
        }
    });
#ifdef ATTN_COUNTS_ALLOCATIONS
    sequential here;
    workspace memory(training_workspace_bytes(norm, s));
    tensor<TestType> out(s);
    CHECK(allocations_in([&] { train(norm, x, out, expected_statistics, 0.3, execution(here, memory), mask.view()); }) == 0);
#endif
}

TEMPLATE_TEST_CASE("progressive_rep_batch_norm: training blends, warms up and moves statistics as it should; inference is RepBN", "[norm][portable]", ATTN_TEST_NUMBERS) {
    const shape s{2, 1, 60, 23};
    const auto x = random_rows<TestType>(s, 2, 1, 2);
    const auto w = random_numbers<TestType>(23, 2, 1);
    const progressive_rep_batch_norm<rms_norm<TestType>> norm{{.weight = w}, {{}, 0.5}};
    const auto first = normalise(norm.norm, x);
    batch_norm_statistics statistics(23);
    const batch_norm_statistics untouched(23);
    CHECK(same_bits(trained(norm, x, statistics, {}, std::optional<double>()), first));
    CHECK(statistics.mean == untouched.mean);
    CHECK(statistics.variance == untouched.variance);
    CHECK(statistics.batches == 0);
    for (const double gamma : {1.0, 0.75, 0.3, 0.0})
        for (const bool masked : {false, true}) {
            INFO("gamma " << gamma);
            const auto mask = random_mask({2, 1, 60, 1}, 3);
            const token_mask seen = masked ? mask.view() : token_mask{};
            batch_norm_statistics ours(23), theirs(23);
            const auto blended = trained(norm, x, ours, seen, std::optional(gamma));
            const auto second = trained(norm.rep, x, theirs, seen);
            CHECK(ours.mean == theirs.mean);
            CHECK(ours.variance == theirs.variance);
            CHECK(ours.batches == 1);
            auto exact = tensor<double>(s);
            for (index_t e = 0; e < s.size(); ++e)
                exact.data()[e] = gamma * static_cast<double>(first.data()[e]) + (1 - gamma) * static_cast<double>(second.data()[e]);
            CHECK(largest_error(blended, exact) <= 32 * epsilon<TestType>);
        }
    auto inference = norm;
    inference.rep.batch.mean = statistics.mean;
    inference.rep.batch.variance = statistics.variance;
    CHECK(same_bits(normalise(inference, x), normalise(inference.rep, x)));
}

/// The tokens themselves, by way of a workspace that holds them many times.
struct roundabout_norm : identity_norm<float> {
    std::size_t workspace_bytes(const shape& x, index_t, bool = false) const { return 100 * static_cast<std::size_t>(x.size()) * sizeof(float); }
    void forward(const stored_view<const float>& x, const stored_view<float>& out, const execution& run) const {
        CHECK(run.workspace().size_bytes() >= workspace_bytes(x.shape(), 1));
        identity_norm<float>::forward(x, out, run);
    }
};

TEST_CASE("progressive_rep_batch_norm: training has the workspace of the norm that needs most", "[norm][portable]") {
    const auto x = random_rows<float>({1, 1, 60, 23}, 2);
    const progressive_rep_batch_norm<roundabout_norm> norm;
    batch_norm_statistics statistics(23);
    CHECK(same_bits(trained(norm, x, statistics, {}, std::optional<double>()), x));
    tensor<float> out(x.shape());
    train(norm, x, out, statistics, 0.5);
    workspace small(training_workspace_bytes(norm.rep, x.shape()));
    sequential here;
    check_says(error_of([&] { train(norm, x, out, statistics, 0.5, execution(here, small)); }), {"progressive_rep_batch_norm", "workspace", "552000"});
}

TEST_CASE("gamma schedules: their exact sequences", "[norm][portable]") {
    const auto sequence = [](const auto& schedule, std::int64_t steps) {
        std::vector<double> gammas;
        step_counter counter;
        for (std::int64_t t = 0; t < steps; ++t) gammas.push_back(counter.next(schedule).value_or(-1));
        CHECK(counter.step == steps);
        return gammas;
    };
    CHECK(sequence(linear_schedule{.steps = 4}, 7) == std::vector<double>{1, 0.75, 0.5, 0.25, 0, 0, 0});
    CHECK(sequence(linear_schedule{.steps = 4, .warm_up = 2, .from = 0.5}, 8) == std::vector<double>{-1, -1, 0.5, 0.375, 0.25, 0.125, 0, 0});
    CHECK(sequence(step_schedule{.steps = 6, .stairs = 2}, 8) == std::vector<double>{1, 1, 1, 0.5, 0.5, 0.5, 0, 0});
    CHECK(sequence(step_schedule{.steps = 4, .stairs = 4, .warm_up = 1}, 6) == std::vector<double>{-1, 1, 0.75, 0.5, 0.25, 0});
    const auto cosine = sequence(cosine_schedule{.steps = 6, .warm_up = 1}, 9);
    const std::vector<double> exact{-1, 1, (1 + std::sqrt(0.75)) / 2, 0.75, 0.5, 0.25, (1 - std::sqrt(0.75)) / 2, 0, 0};
    CHECK(largest_error_of(cosine, exact) <= 1e-15);
    CHECK(cosine[1] == 1);
    CHECK(cosine[7] == 0);
    // 300000 steps, the published setting: any step at once, from a saved counter.
    CHECK(step_counter{75000}.next(linear_schedule{.steps = 300000}) == 0.75);
    CHECK(linear_schedule{.steps = 0}(0) == 0.0);
    CHECK(cosine_schedule{.steps = 0}(0) == 0.0);
    CHECK(step_schedule{.steps = 0}(0) == 0.0);
}

TEMPLATE_TEST_CASE("recalibration: the statistics of all tokens, however they come", "[norm][portable]", ATTN_TEST_NUMBERS) {
    const auto x = random_rows<TestType>({1, 1, 1000, 11}, 5, 100, 3);
    const auto wide = reference::widen(x.view());
    const reference::channel_statistics<double> exact(wide.view());
    thread_pool pool(2);
    for (const index_t cut : {0, 1, 333, 1000}) {
        recalibration r(11);
        workspace memory(recalibration::workspace_bytes<TestType>(x.shape(), pool));
        const execution run(pool, memory);
        r.add<TestType>({x.data(), {1, 1, cut, 11}, {0, 0, 11, 1}}, run);
        r.add<TestType>({x.data() + cut * 11, {1, 1, 1000 - cut, 11}, {0, 0, 11, 1}}, run);
        const auto statistics = r.statistics();
        CHECK(r.tokens() == 1000);
        for (std::size_t c = 0; c < 11; ++c) {
            CHECK(std::abs(statistics.mean[c] - exact.mean[c]) <= 100 * rounding<TestType>);
            CHECK(std::abs(statistics.variance[c] - exact.unbiased_variance(c)) <= 9 * rounding<TestType>);
        }
    }
}

} // namespace attn::testing
