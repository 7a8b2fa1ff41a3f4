#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/dual.hpp>
#include <attn/score/kerple.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/simd/elementary.hpp>
#include <attn/simd/positions.hpp>

#include "catch.hpp"

#include <array>
#include <cmath>

using namespace attn;

namespace {

using attn::index_t; // POSIX has another

/// Score functions by their texts, with arguments where they are smooth.
template <class F>
void for_each_text(const F& f) {
    f("arithmetic", []<class S>(S x, auto i, auto j) { return (S(2) * x - S(3)) / (x * x + S(1)) - (-x) + S(0.1) * S(i - j); });
    f("in place", []<class S>(S x, auto, auto) { S y = x; y += S(1); y *= x; y -= S(0.5); y /= S(4); return y; });
    f("abs, max, min", []<class S>(S x, auto, auto) {
        using std::abs, std::max, std::min;
        return abs(x) + max(x, S(0.3) * x) - min(x * x, S(0.7));
    });
    f("exp, log", []<class S>(S x, auto, auto) {
        using std::exp, std::log;
        return exp(S(-0.5) * x * x) + log(x * x + S(0.1));
    });
    f("sqrt, tanh, fma", []<class S>(S x, auto, auto) {
        using std::fma, std::sqrt, std::tanh;
        return fma(sqrt(x * x + S(1)), tanh(x), x);
    });
    f("pow of a number", []<class S>(S x, auto, auto) {
        using std::pow;
        return pow(x, S(3)) + pow(x * x + S(1), S(0.4));
    });
    f("pow with an exponent that varies", []<class S>(S x, auto, auto) {
        using std::pow;
        return pow(S(1.5), x);
    });
    f("select", []<class S>(S x, auto, auto) {
        using attn::select;
        return select(x > S(0), x * x, S(0.1) * x) + select(x < S(-1), S(1), x);
    });
    f("comparisons", []<class S>(S x, auto, auto) {
        using attn::select;
        return select(x >= S(2), x, select(x <= S(-2), -x, select(x != S(9), x * x, select(x == S(9), S(0), S(1)))));
    });
    f("soft_cap", soft_cap{1.5});
}

constexpr std::array points{-2.6, -1.7, -0.45, 0.2, 0.9, 1.3, 2.45};

} // namespace

TEST_CASE("dual: the slope of a score function's text is what finite differences say", "[score][portable]") {
    for_each_text([](const char* name, const auto& text) {
        INFO(name);
        for (const double x : points) {
            constexpr double step = 1e-4;
            const auto at = [&](double y) { return static_cast<double>(text(y, index_t{7}, index_t{3})); };
            const auto slope = (8 * (at(x + step) - at(x - step)) - (at(x + 2 * step) - at(x - 2 * step))) / (12 * step);
            const auto ours = attn::detail::differentiated(text, x, index_t{7}, index_t{3});
            INFO("at " << x);
            CHECK(std::abs(ours.value - at(x)) <= 1e-15 * (1 + std::abs(at(x))));
            CHECK(std::abs(ours.derivative - slope) <= 1e-9 * (1 + std::abs(slope)));
        }
    });
}

TEMPLATE_TEST_CASE("dual: on lanes as on numbers", "[score][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType>;
    for_each_text([](const char* name, const auto& text) {
        INFO(name);
        const simd::query_lanes<TestType> queries{{7, 1}};
        for (const double x : points) {
            const auto ours = attn::detail::differentiated(text, lanes(static_cast<TestType>(x)), queries, 3);
            std::array<TestType, lanes::size> values, slopes;
            ours.value.store(values.data());
            ours.derivative.store(slopes.data());
            for (std::size_t l = 0; l < values.size(); ++l) {
                const auto exact = attn::detail::differentiated(text, static_cast<double>(static_cast<TestType>(x)), 7 + static_cast<index_t>(l), index_t{3});
                constexpr auto tolerance = 64 * static_cast<double>(std::numeric_limits<TestType>::epsilon());
                CHECK(std::abs(static_cast<double>(values[l]) - exact.value) <= tolerance * (1 + std::abs(exact.value)));
                CHECK(std::abs(static_cast<double>(slopes[l]) - exact.derivative) <= tolerance * (1 + std::abs(exact.derivative)));
            }
        }
    });
}

TEST_CASE("dual: at a kink, abs has the slope 0, max and min that of their first argument", "[score]") {
    const dual<double> x(0, 1), y(0, 5);
    CHECK(abs(x).derivative == 0);
    CHECK(max(x, y).derivative == 1);
    CHECK(min(x, y).derivative == 1);
    CHECK(pow(dual<double>(-2, 1), dual<double>(2)).derivative == -4);
}

TEMPLATE_TEST_CASE("dual: a derivative of 0 stays 0 through an infinite slope, and a slope of 0 takes an infinite derivative", "[score][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    using lanes = simd::lanes<T>;
    const std::vector<double> r1{0.5}, r2{0.7};
    const simd::query_lanes<T> queries{{4, 1}};
    const auto check = [&](const char* name, const auto& f, T score, T slope) { // of a query at its own position, and in lanes beside others
        INFO(name);
        CHECK(attn::detail::differentiated(f, score, index_t{4}, index_t{4}).derivative == slope);
        T slopes[lanes::size];
        attn::detail::differentiated(f, lanes(score), queries, 4).derivative.store(slopes);
        for (const T ours : slopes) CHECK(ours == slope);
    };
    check("kerple_power", kerple_power{r1, r2}.at(0, 0), T(0.3), T{1});
    check("sqrt", []<class S>(S x, auto i, auto j) { using std::sqrt; return x - sqrt(S(i - j)); }, T(0.3), T{1});
    check("pow", []<class S>(S x, auto i, auto j) { using std::pow; return x - pow(S(i - j), S(0.5)); }, T(0.3), T{1});
    check("log", []<class S>(S x, auto i, auto j) { using std::exp, std::log; return x - exp(S(2) * log(S(i - j))); }, T(0.3), T{1});
    check("quotient", []<class S>(S x, auto i, auto j) { return x - S(1) / (S(1) + S(1) / S(i - j)); }, T(0.3), T{1});
    check("saturated tanh", []<class S>(S x, auto, auto) { using std::tanh; return tanh(x * x * x); }, std::numeric_limits<T>::max() / 4, T{0});
    check("sigmoid", []<class S>(S x, auto, auto) { using std::exp; return S(1) / (S(1) + exp(-x)); }, T(-5000), T{0});
    check("erf", []<class S>(S x, auto, auto) { using std::erf; return erf(x * x); }, std::numeric_limits<T>::max() / 4, T{0});
}

TEST_CASE("dual: a chain's slope is the product of its functions', each where it is", "[score]") {
    const std::vector<double> slopes{0.5};
    const composed_score chain{soft_cap{2}, [](auto score, auto, auto) { return score * score; }, alibi(slopes)};
    const auto bound = score_at(chain, 0, 0);
    const double x = 1.2, capped = 2 * std::tanh(x / 2);
    const auto ours = attn::detail::differentiated(bound, x, index_t{4}, index_t{1});
    CHECK(ours.value == Approx(capped * capped - 1.5));
    CHECK(ours.derivative == Approx(2 * capped * (1 - capped * capped / 4)));
}

TEST_CASE("dual: a score function may say its own slope", "[score]") {
    struct rounded {
        double operator()(double score, index_t, index_t) const { return std::round(score); }
        double derivative(double, index_t, index_t) const { return 1; } // straight through
    };
    const auto ours = attn::detail::differentiated(rounded{}, 1.7, index_t{0}, index_t{0});
    CHECK(ours.value == 2);
    CHECK(ours.derivative == 1);
}
