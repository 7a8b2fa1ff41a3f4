// Activations, rotary and sinusoidal positions against their formulas: what depends on the instruction set, apart from larger layers.
#include "catch.hpp"
#include "layer_formulas.hpp"
#include "norm_checks.hpp"

#include <attn/layer/activation.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/layer/sinusoidal.hpp>
#include <attn/simd/lanes.hpp>

namespace attn::testing {

TEMPLATE_TEST_CASE("activations: lanes against the formulas", "[layer][portable]", float, double) {
    using lanes = simd::lanes<TestType, simd::native>;
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

TEMPLATE_TEST_CASE("rotary: part of the channels, any strides, a position for each batch entry", "[layer][portable]", float, double) {
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
                auto expected = reference::widen(x.view()), ours = reference::widen(turned.copy().view());
                plain_rotary(expected, 8, interleaved, first[static_cast<std::size_t>(b)]);
                double worst = 0;
                for (index_t e = b * expected.shape().size() / 2; e < (b + 1) * expected.shape().size() / 2; ++e)
                    worst = std::max(worst, std::abs(expected.data()[e] - ours.data()[e]));
                CHECK(worst <= 4 * epsilon<T> * largest_magnitude(expected));
            }
        }
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
    CHECK(error_of([] { fill_sinusoidal_positions(tensor<float>({1, 2, 3, 4}).view()); }) ==
          "fill_sinusoidal_positions: table has shape (1, 2, 3, 4), not that of a matrix (1, 1, positions, channels)");
    for (const index_t first : {std::numeric_limits<index_t>::max(), std::numeric_limits<index_t>::min(), farthest_position - 1})
        check_says(error_of([&] { fill_sinusoidal_positions(table.view(), first); }),
                   {"fill_sinusoidal_positions: first is " + std::to_string(first) + " for 3 rows"});
    fill_sinusoidal_positions(table.view(), farthest_position - 2);
    CHECK(at(1, 0) == static_cast<double>(static_cast<float>(std::sin(static_cast<double>(farthest_position - 1)))));
}

} // namespace attn::testing
