// Activations, rotary and sinusoidal positions against their formulas: what depends on the instruction set, apart from larger layers.
#include "catch.hpp"
#include "layer_formulas.hpp"
#include "norm_checks.hpp"

#include <attn/layer/feed_forward.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/layer/sinusoidal.hpp>
#include <attn/score/dual.hpp>
#include <attn/simd/lanes.hpp>

namespace attn::testing {

TEMPLATE_TEST_CASE("activations: lanes against the formulas", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType>;
    const auto check = [](auto f, double (*exact)(double)) {
        for (double x = -30; x < 30; x += 0.023) {
            TestType in[lanes::size], out[lanes::size];
            for (auto& number : in) number = static_cast<TestType>(x);
            static_cast<lanes>(f(lanes::load(in))).store(out);
            const auto expected = exact(static_cast<double>(in[0]));
            // xsimd's erf of doubles is right to 34 units in the last place.
            const auto bound = (std::same_as<TestType, double> ? 20 : 4) * epsilon<TestType> * std::max(1.0, std::abs(x));
            if (!(std::abs(static_cast<double>(out[0]) - expected) <= bound))
                FAIL("lanes at " << x << ": " << out[0] << ", not " << expected);
            if (!(std::abs(static_cast<double>(f(in[0])) - expected) <= bound)) FAIL("numbers at " << x);
        }
    };
    check(gelu{}, plain_gelu);
    check(silu{}, plain_silu);
    check(relu{}, plain_relu);
    check(gelu_tanh{},
          [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * std::pow(x, 3)))); });
    CHECK(std::abs(plain_gelu(1) - 0.8413447460685429) < 1e-15);
    CHECK(std::isnan(gelu{}(std::numeric_limits<double>::quiet_NaN())));
}

TEMPLATE_TEST_CASE("activations: their slopes far from 0 are their limits", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType>;
    const auto check = [](const auto& f, double (*exact)(double), double from) {
        const auto most = static_cast<double>(std::numeric_limits<TestType>::max()) / 4;
        for (double x = from; x < most; x *= 1.7)
            for (const auto at : {static_cast<TestType>(x), static_cast<TestType>(-x)}) {
                INFO("at " << at);
                const auto expected = exact(static_cast<double>(at));
                const auto near = [&](TestType slope) { return std::abs(static_cast<double>(slope) - expected) <= 8 * epsilon<TestType> * std::abs(expected) + 1e-28; };
                CHECK(near(detail::differentiated(f, at).derivative));
                TestType slopes[lanes::size];
                detail::differentiated(f, lanes(at)).derivative.store(slopes);
                CHECK(near(slopes[0]));
                static_cast<lanes>(f(lanes(at))).store(slopes);
                CHECK(std::isfinite(slopes[0]));
            }
    };
    constexpr double far = 70; // the slope is its limit to the last place
    const auto step = [](double x) { return x > 0 ? 1.0 : 0.0; };
    check(gelu{}, step, far);
    check(gelu_tanh{}, step, far);
    check(relu{}, step, far);
    check(silu{}, [](double x) { return x > 0 ? 1 : std::exp(x) * (1 + x); }, far);
    const auto sigmoid = []<class S>(S x) { // as a user writes it
        using std::exp;
        return S(1) / (S(1) + exp(-x));
    };
    check(sigmoid, [](double) { return 0.0; }, far);
    check([sigmoid](auto x) { return x * sigmoid(x); }, step, far);
}

TEMPLATE_TEST_CASE("silu: its slope is what finite differences say", "[layer][portable]", ATTN_TEST_NUMBERS) {
    for (double x = -30; x < 30; x += 0.137) {
        constexpr double step = 1e-5;
        const auto slope = (plain_silu(x + step) - plain_silu(x - step)) / (2 * step);
        CHECK(std::abs(static_cast<double>(silu{}.derivative(static_cast<TestType>(x))) - slope) <= 1e-9 + 100 * epsilon<TestType>);
    }
}

TEMPLATE_TEST_CASE("rotary: part of the channels, any strides, a position for each batch entry", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<index_t> first{3, 11};
    for (const bool interleaved : {false, true})
        for (const auto& [l, name] : all_layouts) {
            INFO(name);
            const rotary<T> turns(100, 8, interleaved ? rotary_pairs::interleaved : rotary_pairs::half_split);
            const auto x = random_rows<T>({2, 3, 40, 11}, 5);
            placed<T> turned(x, l);
            rotate(turns, turned.view(), per_batch(first), turned.view());
            CHECK(turned.guards_intact());
            for (index_t b = 0; b < 2; ++b) {
                const auto copy = turned.copy();
                auto expected = reference::widen(x.view()), ours = reference::widen(copy.view());
                plain_rotary(expected, 8, interleaved, first[static_cast<std::size_t>(b)]);
                double worst = 0;
                for (index_t e = b * expected.shape().size() / 2; e < (b + 1) * expected.shape().size() / 2; ++e)
                    worst = std::max(worst, std::abs(expected.data()[e] - ours.data()[e]));
                CHECK(worst <= 4 * epsilon<T> * largest_magnitude(expected));
            }
        }
}

TEST_CASE("rotary: frequencies and how they are stretched", "[layer][portable]") {
    const auto close_to = [](const rotary_frequencies& f, const std::vector<double>& expected, double magnitude) {
        REQUIRE(f.values.size() == expected.size());
        for (std::size_t p = 0; p < expected.size(); ++p) CHECK(f.values[p] == Approx(expected[p]).epsilon(1e-12));
        CHECK(f.magnitude == Approx(magnitude).epsilon(1e-14));
    };
    close_to(rotary_frequencies::geometric(8), {1, 0.1, 0.01, 0.001}, 1);
    close_to(rotary_frequencies::interpolated(8, 4), {0.25, 0.025, 0.0025, 0.00025}, 1);
    // base 10000 * 8^(8 / 6) = 160000
    close_to(rotary_frequencies::ntk(8, 8), {1, 0.05, 0.0025, 0.000125}, 1);
    // d(b) = 8 log(2048 / (2 pi b)) / (2 log 10000): d(32) = 1.008, d(1) = 2.513; low 1, high 3: r = 0, 0, 1/2, 1
    close_to(rotary_frequencies::yarn(8, 4, 2048), {1, 0.1, 0.01 * (0.5 + 0.125), 0.00025}, 0.1 * std::log(4) + 1);
    close_to(rotary_frequencies::yarn(8, 0.5, 2048), {1, 0.1, 0.01 * (0.5 + 1), 0.002}, 1);
    close_to(rotary_frequencies::geometric(0), {}, 1);
    const auto refusal = [](auto&& f) { return error_of(f); };
    CHECK(refusal([] { rotary_frequencies::geometric(7); }) == "rotary: channels are 7, but they are turned in pairs");
    CHECK(refusal([] { rotary_frequencies::geometric(8, -1); }) == "rotary_frequencies: base is -1.000000, but must be above 0 and finite");
    CHECK(refusal([] { rotary_frequencies::interpolated(8, 0); }) == "rotary_frequencies: factor is 0.000000, but must be above 0 and finite");
    CHECK(refusal([] { rotary_frequencies::ntk(2, 2); }) == "rotary_frequencies: channels are 2, but ntk needs 4 at least");
    CHECK(refusal([] { rotary_frequencies::yarn(8, 2, 0); }) == "rotary_frequencies: training_length is 0.000000, but must be above 0 and finite");
    CHECK(refusal([] { rotary_frequencies::yarn(8, 2, 100, 1); }) == "rotary_frequencies: base is 1: yarn divides by its logarithm");
}

TEMPLATE_TEST_CASE("rotary: given tables and a magnitude turn as they say", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto x = random_rows<T>({2, 2, 5, 6}, 5);
    const auto cosines = random_rows<T>({1, 1, 9, 2}, 6), sines = random_rows<T>({1, 1, 9, 2}, 7);
    for (const bool interleaved : {false, true}) {
        const rotary<T> turns(cosines, sines, interleaved ? rotary_pairs::interleaved : rotary_pairs::half_split);
        const auto out = rotate(turns, x, 3);
        index_t wrong = 0;
        for (index_t b = 0; b < 2; ++b)
            for (index_t h = 0; h < 2; ++h)
                for (index_t i = 0; i < 5; ++i) {
                    for (index_t p = 0; p < 2; ++p) {
                        const auto left = interleaved ? 2 * p : p, right = interleaved ? 2 * p + 1 : p + 2;
                        const double c = static_cast<double>(cosines(0, 0, 3 + i, p)), s = static_cast<double>(sines(0, 0, 3 + i, p));
                        const double u = static_cast<double>(x(b, h, i, left)), v = static_cast<double>(x(b, h, i, right));
                        wrong += !(std::abs(static_cast<double>(out(b, h, i, left)) - (u * c - v * s)) <= 8 * epsilon<T>);
                        wrong += !(std::abs(static_cast<double>(out(b, h, i, right)) - (u * s + v * c)) <= 8 * epsilon<T>);
                    }
                    wrong += out(b, h, i, 4) != x(b, h, i, 4) || out(b, h, i, 5) != x(b, h, i, 5);
                }
        CHECK(wrong == 0);
    }
    const rotary<T> plain(20, rotary_frequencies::geometric(6)), larger(20, {rotary_frequencies::geometric(6).values, 2});
    const auto once = rotate(plain, x, 4), twice = rotate(larger, x, 4);
    for (index_t e = 0; e < x.shape().size(); ++e) CHECK(twice.data()[e] == 2 * once.data()[e]);
    CHECK(error_of([&] { rotary<T>(cosines, random_rows<T>({1, 1, 8, 2}, 1)); }) ==
          "rotary: sines have shape (1, 1, 8, 2), but the cosines have (1, 1, 9, 2)");
    CHECK(error_of([&] { rotary<T>(x, x); }) == "rotary: cosines have shape (2, 2, 5, 6), but (1, 1, positions, pairs) is needed");
}

TEMPLATE_TEST_CASE("rotary: a position for each token, along one axis or two", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto x = random_rows<T>({2, 3, 6, 11}, 5);
    for (const auto pairs : {rotary_pairs::interleaved, rotary_pairs::half_split}) {
        const rotary<T> turns(30, 4, pairs);
        const auto same = [&](const tensor<T>& a, index_t b, index_t i, const tensor<T>& of, index_t from_channel, index_t count) {
            index_t differing = 0;
            for (index_t h = 0; h < 3; ++h)
                for (index_t c = from_channel; c < from_channel + count; ++c) differing += a(b, h, i, c) != of(b, h, i, c);
            return differing == 0;
        };
        tensor<index_t> places({2, 1, 6, 1});
        for (index_t e = 0; e < 12; ++e) places.data()[e] = e * 7 % 24;
        const auto out = rotate(turns, x, places);
        // Each row alone, counted from its own position.
        for (index_t b = 0; b < 2; ++b)
            for (index_t i = 0; i < 6; ++i) {
                const auto row = x.slice({.batch = {b, 1}, .tokens = {i, 1}});
                const auto alone = rotate(turns, row, places(b, 0, i, 0));
                index_t differing = 0;
                for (index_t h = 0; h < 3; ++h)
                    for (index_t c = 0; c < 11; ++c) differing += alone(0, h, 0, c) != out(b, h, i, c);
                CHECK(differing == 0);
            }
        // Two axes: four channels by the row, four by the column, of a grid of 2 x 3.
        const auto grid = grid_positions(2, 3);
        const auto turned = rotate(turns, x, grid);
        index_t wrong = 0;
        const auto frequency = [](index_t p) { return std::pow(10000.0, -2.0 * static_cast<double>(p) / 4); };
        for (index_t b = 0; b < 2; ++b)
            for (index_t h = 0; h < 3; ++h)
                for (index_t i = 0; i < 6; ++i) {
                    for (index_t pair = 0; pair < 4; ++pair) {
                        const auto angle = static_cast<double>(pair < 2 ? i / 3 : i % 3) * frequency(pair % 2);
                        const bool split = pairs == rotary_pairs::half_split;
                        const auto left = split ? pair : 2 * pair, right = split ? pair + 4 : 2 * pair + 1;
                        const double u = static_cast<double>(x(b, h, i, left)), v = static_cast<double>(x(b, h, i, right));
                        wrong += !(std::abs(static_cast<double>(turned(b, h, i, left)) - (u * std::cos(angle) - v * std::sin(angle))) <= 8 * epsilon<T>);
                        wrong += !(std::abs(static_cast<double>(turned(b, h, i, right)) - (u * std::sin(angle) + v * std::cos(angle))) <= 8 * epsilon<T>);
                    }
                    wrong += !same(turned, b, i, x, 8, 3);
                }
        CHECK(wrong == 0);
    }
    const rotary<T> turns(5, 6);
    const auto grid = grid_positions(2, 3);
    CHECK(error_of([&] { (void)rotate(turns, x, grid); }) == "rotary: x has shape (2, 3, 6, 11), but rotary turns 6 channels for each of 2 axes");
    tensor<index_t> places({1, 1, 6, 1});
    places(0, 0, 4, 0) = 5;
    CHECK(error_of([&] { (void)rotate(turns, x, places); }) == "rotary: x has a token at position 5, but rotary has 0 to 4");
    places(0, 0, 4, 0) = -1;
    CHECK(error_of([&] { (void)rotate(turns, x, places); }) == "rotary: x has a token at position -1, but rotary has 0 to 4");
    const tensor<index_t> five({1, 1, 5, 1});
    CHECK(error_of([&] { (void)rotate(turns, x, five); }) == "rotary: positions have shape (1, 1, 5, 1), but x has (2, 3, 6, 11)");
    CHECK_THROWS_AS(grid_positions(-1, 2), shape_error);
}

TEST_CASE("rotary: positions that the table has not are refused, to the ends of their type", "[layer][portable]") {
    const rotary<float> turns(100, 8);
    const auto refusal = [&](index_t first) {
        return error_of([&] { turns.check("multi_head", "q", {.tokens = 40, .channels = 8}, first); });
    };
    CHECK(refusal(60) == nothing_thrown);
    constexpr auto min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    for (const index_t first : {min_index, index_t{-1}, index_t{61}, max_index - 39, max_index - 38, max_index})
        check_says(refusal(first), {"multi_head: q lies at positions " + std::to_string(first) + " to ", "but rotary has 0 to 99"});
}

TEST_CASE("sinusoidal positions: by hand", "[layer][portable]") {
    tensor<float> table({1, 1, 3, 5});
    fill_sinusoidal_positions(table.view(), 7);
    const auto at = [&](index_t r, index_t c) { return static_cast<double>(table(0, 0, r, c)); };
    CHECK(std::abs(at(2, 0) - std::sin(9.0)) < 1e-7);
    CHECK(std::abs(at(2, 1) - std::cos(9.0)) < 1e-7);
    CHECK(std::abs(at(1, 2) - std::sin(8 / std::pow(10000, 2 / 5.0))) < 1e-7);
    CHECK(std::abs(at(1, 4) - std::sin(8 / std::pow(10000, 4 / 5.0))) < 1e-7);
    tensor<float> heads({1, 2, 3, 4});
    CHECK(error_of([&] { fill_sinusoidal_positions(heads.view()); }) ==
          "fill_sinusoidal_positions: table has shape (1, 2, 3, 4), not that of a matrix (1, 1, positions, channels)");
    for (const index_t first : {std::numeric_limits<index_t>::max(), std::numeric_limits<index_t>::min(), farthest_position - 1})
        check_says(error_of([&] { fill_sinusoidal_positions(table.view(), first); }),
                   {"fill_sinusoidal_positions: first is " + std::to_string(first) + " for 3 rows"});
    fill_sinusoidal_positions(table.view(), farthest_position - 2);
    CHECK(at(1, 0) == static_cast<double>(static_cast<float>(std::sin(static_cast<double>(farthest_position - 1)))));
}

} // namespace attn::testing
