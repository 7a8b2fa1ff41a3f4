// layer_norm and rms_norm against their definitions on rows that are hard. attn_random has rows of every size.
#include "catch.hpp"
#include "norm_checks.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rms_norm.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
double layer_norm_error(const tensor<T>& x, double eps) {
    const auto exact = exact_rows(x, [&](const auto& from, const auto& to) { reference::layer_norm<double>(from, to, {}, {}, eps); });
    return largest_error(normalise(layer_norm<T>{.eps = eps}, x), exact) / epsilon<T>;
}

} // namespace

TEMPLATE_TEST_CASE("layer_norm: closed forms", "[norm][portable]", ATTN_TEST_NUMBERS) {
    // Two numbers a, b are (a - b) / 2 = d from their mean: +-d / sqrt(d^2 + eps).
    tensor<TestType> x({1, 1, 1, 2});
    x.data()[0] = 3;
    x.data()[1] = 7;
    auto y = normalise(layer_norm<TestType>{.eps = 5}, x);
    CHECK(std::abs(static_cast<double>(y.data()[0]) - (-2.0 / 3)) <= 4 * epsilon<TestType>);
    CHECK(std::abs(static_cast<double>(y.data()[1]) - (2.0 / 3)) <= 4 * epsilon<TestType>);
    // 3, 4, 0, 0 has the mean square 25/4.
    x = tensor<TestType>({1, 1, 1, 4});
    x.data()[0] = 3;
    x.data()[1] = 4;
    y = normalise(rms_norm<TestType>{.eps = 2.75}, x);
    CHECK(y.data()[0] == TestType(1));
    CHECK(std::abs(static_cast<double>(y.data()[1]) - (4.0 / 3)) <= 4 * epsilon<TestType>);
    CHECK(y.data()[2] == 0);
}

TEMPLATE_TEST_CASE("layer_norm: a constant row gives the bias, exactly", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const auto value : {0.0, 0.1, -1e6, 3e30})
        for (const index_t channels : {1, 5, 64, 100}) {
            tensor<TestType> x({1, 1, 3, channels});
            std::fill_n(x.data(), x.shape().size(), static_cast<TestType>(value));
            const auto b = random_numbers<TestType>(channels, 4);
            const auto y = normalise(layer_norm<TestType>{.bias = b}, x);
            for (index_t i = 0; i < 3; ++i) CHECK(std::equal(b.begin(), b.end(), y.data() + i * channels));
        }
}

TEMPLATE_TEST_CASE("layer_norm: a common offset costs no digits", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const double offset : {1e3, 1e6, -1e6, std::same_as<TestType, double> ? 1e12 : 2e6})
        for (const index_t channels : {5, 17, 64, 100, 768})
            for (unsigned seed = 0; seed < 4; ++seed) {
                const auto x = random_rows<TestType>({1, 1, 6, channels}, seed, offset);
                // In double, what is seen is the reference's own loss.
                CHECK(layer_norm_error<TestType>(x, 1e-5) <= 24 + (std::same_as<TestType, double> ? 16 * std::abs(offset) : 0));
            }
}

TEMPLATE_TEST_CASE("layer_norm: a first number far from the others costs no digits", "[norm][portable]", ATTN_TEST_NUMBERS) {
    for (const double first : {5.0, 30.0, 1e3, 1e6}) {
        auto x = random_rows<TestType>({1, 1, 6, 700}, 7, 0.5);
        for (index_t i = 0; i < 6; ++i) x(0, 0, i, 0) = static_cast<TestType>(first);
        CHECK(layer_norm_error<TestType>(x, 1e-5) <= 24 * std::max(1.0, std::min(first, 27.0)));
    }
}

TEMPLATE_TEST_CASE("layer_norm and rms_norm: scales that overflow or underflow when squared", "[norm][portable]", ATTN_TEST_NUMBERS) {
    const bool is_double = std::same_as<TestType, double>;
    for (const auto& [scale, eps] : {std::pair(is_double ? 1e170 : 1e25, 1e-5), std::pair(is_double ? 1e-170 : 1e-25, is_double ? 1e-300 : 1e-60),
                                     std::pair(is_double ? 1e-170 : 1e-25, 1e-5), std::pair(1e-4, 1e-5), std::pair(1e-8, 1e-16)})
        for (const index_t channels : {2, 16, 100}) {
            INFO("scale " << scale << ", eps " << eps << ", " << channels << " channels");
            const auto x = random_rows<TestType>({1, 1, 5, channels}, 9, 0, scale);
            // The reference in double itself overflows there: what is normalised is the same numbers at scale 1.
            const auto unit = random_rows<double>({1, 1, 5, channels}, 9);
            const auto unit_eps = eps / scale / scale;
            auto layer = tensor<double>(unit.shape()), rms = tensor<double>(unit.shape());
            reference::layer_norm<double>(unit.view(), layer.view(), {}, {}, unit_eps);
            reference::rms_norm<double>(unit.view(), rms.view(), {}, unit_eps);
            CHECK(largest_error(normalise(layer_norm<TestType>{.eps = eps}, x), layer) <= 64 * epsilon<TestType>);
            CHECK(largest_error(normalise(rms_norm<TestType>{.eps = eps}, x), rms) <= 64 * epsilon<TestType>);
        }
}

TEMPLATE_TEST_CASE("layer_norm: finite rows whose differences are not", "[norm][portable]", ATTN_TEST_NUMBERS) {
    const auto largest = std::numeric_limits<TestType>::max();
    for (const index_t channels : {2, 3, 16, 100}) {
        INFO(channels << " channels");
        auto x = random_rows<TestType>({1, 1, 3, channels}, 9, 0, 0.2);
        auto unit = tensor<double>(x.shape()), exact = tensor<double>(x.shape());
        for (index_t i = 0; i < 3; ++i) x(0, 0, i, 0) = i == 1 ? 1 : -1, x(0, 0, i, channels - 1) = i == 1 ? -1 : 1;
        for (index_t e = 0; e < x.shape().size(); ++e) {
            unit.data()[e] = static_cast<double>(x.data()[e]);
            x.data()[e] *= largest;
        }
        reference::layer_norm<double>(std::as_const(unit).view(), exact.view(), {}, {}, 0);
        CHECK(largest_error(normalise(layer_norm<TestType>{}, x), exact) <= 64 * epsilon<TestType>);
    }
}

TEMPLATE_TEST_CASE("layer_norm and rms_norm: NaN and infinity stay in their row", "[norm][portable]", ATTN_TEST_NUMBERS) {
    constexpr auto infinity = std::numeric_limits<TestType>::infinity(), nan = std::numeric_limits<TestType>::quiet_NaN();
    const auto clean = random_rows<TestType>({1, 1, 9, 37}, 5);
    const auto layer = normalise(layer_norm<TestType>{}, clean), rms = normalise(rms_norm<TestType>{}, clean);
    for (const auto bad : {nan, infinity, -infinity})
        for (index_t row = 0; row < 9; ++row)
            for (const index_t column : {0, 5, 36}) {
                auto x = random_rows<TestType>({1, 1, 9, 37}, 5);
                x(0, 0, row, column) = bad;
                const auto a = normalise(layer_norm<TestType>{}, x), b = normalise(rms_norm<TestType>{}, x);
                bool right = true;
                for (index_t i = 0; i < 9; ++i)
                    for (index_t c = 0; c < 37; ++c) {
                        right &= i == row ? std::isnan(a(0, 0, i, c)) : same_bits(a(0, 0, i, c), layer(0, 0, i, c));
                        if (i != row) right &= same_bits(b(0, 0, i, c), rms(0, 0, i, c));
                        else right &= std::isnan(bad) || c == column ? std::isnan(b(0, 0, i, c)) : b(0, 0, i, c) == 0;
                    }
                CHECK(right);
            }
}

} // namespace attn::testing
