// dynamic_tanh, dynamic_erf and unit_norm, and their gradients, against their definitions, and those against finite differences.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/unit_norm.hpp>

namespace attn::testing {

namespace {

static_assert(DifferentiableNorm<dynamic_tanh<float>> && DifferentiableNorm<dynamic_erf<double>> && DifferentiableNorm<unit_norm<float>>);

template <class N>
inline constexpr auto curve_of = N::name == "dynamic_tanh" ? reference::curve::tanh : reference::curve::erf;
template <class N>
double shift_of(const N& norm) {
    if constexpr (requires { norm.shift; }) return norm.shift;
    else return 0;
}

template <Scalar T>
struct curve_gradients {
    tensor<T> x;
    std::vector<T> weight, bias;
    T alpha = guard<T>, shift = guard<T>;

    explicit curve_gradients(const shape& s) : x(s), weight(static_cast<std::size_t>(s.channels), guard<T>), bias(weight) { std::fill_n(x.data(), s.size(), guard<T>); }
    template <class N>
    auto wanted() {
        typename N::gradients g;
        g.x = x, g.weight = weight, g.bias = bias, g.alpha = {&alpha, 1};
        if constexpr (requires { g.shift; }) g.shift = {&shift, 1};
        return g;
    }
    friend bool same_bits(const curve_gradients& a, const curve_gradients& b) {
        const auto same = [](const std::vector<T>& u, const std::vector<T>& v) { return std::ranges::equal(u, v, [](T p, T q) { return testing::same_bits(p, q); }); };
        return testing::same_bits(a.x, b.x) && same(a.weight, b.weight) && same(a.bias, b.bias) && testing::same_bits(a.alpha, b.alpha) && testing::same_bits(a.shift, b.shift);
    }
};

template <class N, class T = typename N::scalar>
curve_gradients<T> curve_gradients_of(const N& norm, const tensor<T>& x, const tensor<T>& given) {
    curve_gradients<T> ours(x.shape());
    backward(norm, x, given, ours.template wanted<N>());
    return ours;
}
/// The definition's, in double.
template <class N>
curve_gradients<double> defined_curve_gradients(const N& norm, const tensor<double>& x, const tensor<double>& given) {
    curve_gradients<double> exact(x.shape());
    const std::vector<double> weight(norm.weight.begin(), norm.weight.end());
    reference::dynamic_curve_backward<double>(curve_of<N>, x.view(), given.view(), {{exact.x, exact.weight, exact.bias}, &exact.alpha, &exact.shift}, norm.alpha, shift_of(norm), weight);
    return exact;
}
template <class N>
tensor<double> exact_curve(const N& norm, const tensor<typename N::scalar>& x) {
    const std::vector<double> weight(norm.weight.begin(), norm.weight.end()), bias(norm.bias.begin(), norm.bias.end());
    return exact_rows(x, [&](const auto& from, const auto& to) { reference::dynamic_curve<double>(curve_of<N>, from, to, norm.alpha, shift_of(norm), weight, bias); });
}

/// Of both curves, with and without parameters, which are numbers of either precision.
template <Scalar T, class F>
void for_each_curve(index_t channels, F&& f) {
    const auto weight = random_numbers<T>(channels, 2, 1, 0.3), bias = random_numbers<T>(channels, 3);
    f(dynamic_tanh<T>{});
    f(dynamic_tanh<T>{.weight = weight, .alpha = -0.75});
    f(dynamic_tanh<T>{weight, bias, 1.25});
    f(dynamic_erf<T>{});
    f(dynamic_erf<T>{.bias = bias, .shift = 0.25});
    f(dynamic_erf<T>{weight, bias, 0.875, -0.5});
}

} // namespace

TEMPLATE_TEST_CASE("dynamic_tanh and dynamic_erf: what their definitions say, at every edge", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto channels : edge_sizes)
        for_each_curve<T>(channels, [&](const auto& norm) {
            INFO(norm.name << " of " << channels << " channels");
            const auto x = random_rows<T>({2, 1, 3, channels}, 1, 0.2, 2);
            CHECK(largest_error(normalise(norm, x), exact_curve(norm, x)) <= 8 * epsilon<T>);
        });
}

TEMPLATE_TEST_CASE("dynamic_tanh and dynamic_erf: closed forms, infinities and NaN", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto infinity = std::numeric_limits<T>::infinity();
    tensor<T> x({1, 1, 1, 6});
    const T numbers[] = {0, infinity, -infinity, std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::max(), T(std::numbers::ln2)};
    std::copy_n(numbers, 6, x.data());
    const std::vector<T> weight(6, T(3)), bias(6, T(1));
    const auto y = normalise(dynamic_tanh<T>{weight, bias, 1}, x), z = normalise(dynamic_erf<T>{weight, bias, 2, 0}, x);
    for (const auto* of : {&y, &z}) {
        CHECK(of->data()[0] == 1);
        CHECK(of->data()[1] == 4);
        CHECK(of->data()[2] == -2);
        CHECK(std::isnan(of->data()[3]));
        CHECK(of->data()[4] == 4);
    }
    CHECK(std::abs(static_cast<double>(y.data()[5]) - (1 + 3 * 0.6)) <= 8 * epsilon<T>); // (2 - 1/2) / (2 + 1/2)

    // Far out a curve is flat: nothing passes, not even to alpha, by which an infinity does not move.
    tensor<T> given({1, 1, 1, 6});
    std::fill_n(given.data(), 6, T(1));
    x.data()[3] = 0;
    const auto g = curve_gradients_of(dynamic_tanh<T>{weight, bias, 1}, x, given);
    for (const index_t c : {1, 2, 4}) CHECK(g.x.data()[c] == 0);
    CHECK(g.x.data()[0] == 3);
    CHECK(std::abs(static_cast<double>(g.alpha) - 3 * std::numbers::ln2 * (1 - 0.36)) <= 16 * epsilon<T>);
}

TEST_CASE("dynamic_tanh and dynamic_erf: the gradients' definitions are what finite differences say", "[norm][portable]") {
    const shape s{2, 1, 3, 7};
    const auto x = random_rows<double>(s, 1), given = random_rows<double>(s, 2), along = random_rows<double>(s, 3);
    for_each_curve<double>(7, [&](const auto& norm) {
        INFO(norm.name);
        using N = std::remove_cvref_t<decltype(norm)>;
        const auto g = defined_curve_gradients(norm, x, given);
        const auto loss = [&](int which, double step) {
            tensor<double> moved(s), out(s);
            for (index_t e = 0; e < s.size(); ++e) moved.data()[e] = x.data()[e] + (which == 0 ? step * along.data()[e] : 0);
            std::vector<double> weight(norm.weight.begin(), norm.weight.end()), bias(norm.bias.begin(), norm.bias.end());
            weight.resize(7, 1.0), bias.resize(7, 0.0);
            for (std::size_t c = 0; c < 7; ++c) (which == 1 ? weight : bias)[c] += which == 1 || which == 2 ? step * along.data()[c] : 0;
            reference::dynamic_curve<double>(curve_of<N>, moved.view(), out.view(), norm.alpha + (which == 3 ? step : 0), shift_of(norm) + (which == 4 ? step : 0), weight, bias);
            double sum = 0;
            for (index_t e = 0; e < s.size(); ++e) sum += out.data()[e] * given.data()[e];
            return sum;
        };
        double expected[5] = {0, 0, 0, g.alpha, g.shift};
        for (index_t e = 0; e < s.size(); ++e) expected[0] += g.x.data()[e] * along.data()[e];
        for (std::size_t c = 0; c < 7; ++c) expected[1] += g.weight[c] * along.data()[c], expected[2] += g.bias[c] * along.data()[c];
        for (int which = 0; which < 5; ++which) {
            constexpr double step = 1e-3;
            const auto slope = (8 * (loss(which, step) - loss(which, -step)) - (loss(which, 2 * step) - loss(which, -2 * step))) / (12 * step);
            INFO("gradient " << which);
            CHECK(std::abs(slope - expected[which]) <= 1e-9);
        }
    });
}

TEMPLATE_TEST_CASE("dynamic_tanh and dynamic_erf: gradients as defined, with the same bits however they are computed", "[norm][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const shape s{3, 2, 31, 83};
    const auto x = random_rows<T>(s, 5), given = random_rows<T>(s, 6);
    for_each_curve<T>(83, [&](const auto& norm) {
        INFO(norm.name);
        using N = std::remove_cvref_t<decltype(norm)>;
        const auto expected = curve_gradients_of(norm, x, given);
        const auto exact = defined_curve_gradients(norm, reference::widen(x.view()), reference::widen(given.view()));
        CHECK(largest_error(expected.x, exact.x) <= 32 * epsilon<T>);
        for (std::size_t c = 0; c < 83; ++c) {
            CHECK(std::abs(static_cast<double>(expected.weight[c]) - exact.weight[c]) <= 200 * epsilon<T>);
            CHECK(std::abs(static_cast<double>(expected.bias[c]) - exact.bias[c]) <= 200 * epsilon<T>);
        }
        CHECK(std::abs(static_cast<double>(expected.alpha) - exact.alpha) <= 5000 * epsilon<T>);
        if (requires { norm.shift; }) CHECK(std::abs(static_cast<double>(expected.shift) - exact.shift) <= 5000 * epsilon<T>);
        for_each_executor([&](auto& executor, const std::string& on) {
            INFO("on " << on);
            curve_gradients<T> ours(s);
            workspace memory(norm.backward_workspace_bytes(s, std::max<index_t>(1, executor.concurrency())));
            backward(norm, x, given, ours.template wanted<N>(), execution(executor, memory));
            CHECK(same_bits(ours, expected));
        });
        for (const auto layout : row_layouts) {
            placed<T> from(x, layout), of_out(given, layout), to(s, layout);
            typename N::gradients only_x;
            only_x.x = to.view();
            backward(norm, tensor_view<const T>(from.view()), tensor_view<const T>(of_out.view()), only_x);
            CHECK(to.guards_intact());
            CHECK(testing::same_bits(to.copy(), expected.x));
        }
        sequential here;
        workspace memory(norm.backward_workspace_bytes(s, 1));
        const execution run(here, memory);
        curve_gradients<T> some(s);
        CHECK(allocations_in([&] { backward(norm, x, given, some.template wanted<N>(), run); }) == 0);
    });
}

TEST_CASE("dynamic_tanh, dynamic_erf and unit_norm: what is wrong is refused, by name", "[norm]") {
    const shape s{1, 2, 3, 8};
    tensor<float> x(s), given(s), to(s), small({1, 2, 3, 7});
    std::vector<float> few(7), weight(8);
    float number = 0, two[2] = {0, 0};
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    const auto refused = [&](const auto& norm, const std::vector<std::string>& parts) { check_says(error_of([&] { (void)normalise(norm, x); }), parts); };
    refused(dynamic_tanh<float>{.weight = few}, {"dynamic_tanh", "weight has 7", "(1, 2, 3, 8)"});
    refused(dynamic_tanh<float>{.bias = few}, {"dynamic_tanh", "bias has 7"});
    refused(dynamic_tanh<float>{.alpha = infinity}, {"dynamic_tanh", "alpha is not finite"});
    refused(dynamic_erf<float>{.weight = few}, {"dynamic_erf", "weight has 7"});
    refused(dynamic_erf<float>{.bias = few}, {"dynamic_erf", "bias has 7"});
    refused(dynamic_erf<float>{.alpha = 1e39}, {"dynamic_erf", "alpha is 1e+39"});
    refused(dynamic_erf<float>{.shift = -infinity}, {"dynamic_erf", "shift is not finite"});
    refused(unit_norm<float>{.eps = 0}, {"unit_norm", "eps is 0"});
    refused(unit_norm<float>{.eps = 1e-39}, {"unit_norm", "1 / eps is 1e+39"});
    check_says(error_of([&] { normalise(dynamic_tanh<float>{.weight = weight}, tensor_view<const float>(x.data(), {1, 1, 1, 8}, {8, 8, 8, 1}), tensor_view<float>(weight.data(), {1, 1, 1, 8}, {8, 8, 8, 1})); }),
               {"dynamic_tanh", "overlaps weight"});

    const auto gradient_refused = [&](const auto& norm, const auto& change, const std::vector<std::string>& parts) {
        typename std::remove_cvref_t<decltype(norm)>::gradients wanted;
        wanted.x = to;
        change(wanted);
        check_says(error_of([&] { backward(norm, x, given, wanted); }), parts);
    };
    gradient_refused(dynamic_tanh<float>{}, [&](auto& g) { g.x = small; }, {"dynamic_tanh", "wanted.x", "(1, 2, 3, 7)"});
    gradient_refused(dynamic_tanh<float>{}, [&](auto& g) { g.weight = few; }, {"wanted.weight", "(1, 1, 1, 7)"});
    gradient_refused(dynamic_tanh<float>{}, [&](auto& g) { g.alpha = two; }, {"wanted.alpha", "(1, 1, 1, 2)"});
    gradient_refused(dynamic_tanh<float>{}, [&](auto& g) { g.alpha = {to.data(), 1}; }, {"wanted.alpha", "overlaps wanted.x"});
    gradient_refused(dynamic_erf<float>{}, [&](auto& g) { g.alpha = {&number, 1}, g.shift = {&number, 1}; }, {"dynamic_erf", "wanted.shift", "overlaps wanted.alpha"});
    gradient_refused(unit_norm<float>{}, [&](auto& g) { g.x = given; }, {"unit_norm", "wanted.x", "overlaps d_out"});
}

TEMPLATE_TEST_CASE("unit_norm: rows as defined, at every edge and of any size", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const bool is_double = std::same_as<T, double>;
    for (const auto channels : edge_sizes) {
        INFO(channels << " channels");
        const auto unit = random_rows<T>({1, 2, 3, channels}, 1);
        const auto exact = exact_rows(unit, [](const auto& from, const auto& to) { reference::unit_norm<double>(from, to); });
        // Powers of two scale a row exactly: its squares overflow, or sink below the normal numbers.
        for (const int exponent : {0, 40, is_double ? 1000 : 120, is_double ? -1000 : -110}) {
            auto x = random_rows<T>({1, 2, 3, channels}, 1);
            for (index_t e = 0; e < x.shape().size(); ++e) x.data()[e] = std::ldexp(x.data()[e], exponent);
            CHECK(largest_error(normalise(unit_norm<T>{.eps = is_double ? 1e-307 : 1e-37}, x), exact) <= 16 * epsilon<T>);
        }
    }
}

TEMPLATE_TEST_CASE("unit_norm: short rows, zeros, infinities and NaN", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    tensor<T> x({1, 1, 5, 4});
    const T numbers[] = {3, 0, -4, 0, T(0.25), 0, 0, 0, 0, 0, 0, 0, 1, infinity, 2, 0, 1, nan, 2, 0};
    std::copy_n(numbers, 20, x.data());
    const auto y = normalise(unit_norm<T>{.eps = 0.5}, x);
    CHECK(std::abs(static_cast<double>(y(0, 0, 0, 0)) - 0.6) <= epsilon<T>);
    CHECK(std::abs(static_cast<double>(y(0, 0, 0, 2)) + 0.8) <= epsilon<T>);
    CHECK(y(0, 0, 1, 0) == T(0.5));
    for (index_t c = 0; c < 4; ++c) {
        CHECK(y(0, 0, 2, c) == 0);
        CHECK((c == 1 ? std::isnan(y(0, 0, 3, c)) : y(0, 0, 3, c) == 0));
        CHECK(std::isnan(y(0, 0, 4, c)));
    }
    // A row that is longer than eps passes nothing along itself; a shorter one passes all, over eps.
    tensor<T> given(x.shape()), to(x.shape());
    std::copy_n(x.data(), 8, given.data());
    backward(unit_norm<T>{.eps = 0.5}, x.slice({.tokens = {0, 2}}), given.slice({.tokens = {0, 2}}), {to.slice({.tokens = {0, 2}})});
    for (index_t c = 0; c < 4; ++c) CHECK(std::abs(static_cast<double>(to(0, 0, 0, c))) <= epsilon<T>);
    CHECK(to(0, 0, 1, 0) == T(0.5));
}

TEMPLATE_TEST_CASE("unit_norm: gradients as defined, with the same bits however they are computed", "[norm][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const shape s{3, 2, 31, 83};
    const auto x = random_rows<T>(s, 5), given = random_rows<T>(s, 6);
    for (const double eps : {1e-12, 9.0}) { // of half of the rows, the norm is below 9
        const unit_norm<T> norm{eps};
        tensor<T> expected(s);
        backward(norm, x, given, {expected});
        tensor<double> exact(s);
        const auto wide_x = reference::widen(x.view()), wide_given = reference::widen(given.view());
        reference::unit_norm_backward<double>(wide_x.view(), wide_given.view(), exact.view(), eps);
        CHECK(largest_error(expected, exact) <= 32 * epsilon<T>);
        for_each_executor([&](auto& executor, const std::string& on) {
            INFO("on " << on);
            tensor<T> ours(s);
            workspace memory(norm.backward_workspace_bytes(s, std::max<index_t>(1, executor.concurrency())));
            backward(norm, x, given, {ours}, execution(executor, memory));
            CHECK(testing::same_bits(ours, expected));
        });
        for (const auto layout : row_layouts) {
            placed<T> from(x, layout), of_out(given, layout), to(s, layout);
            backward(norm, tensor_view<const T>(from.view()), tensor_view<const T>(of_out.view()), {to.view()});
            CHECK(to.guards_intact());
            CHECK(testing::same_bits(to.copy(), expected));
        }
    }
}

TEST_CASE("unit_norm: the gradient's definition is what finite differences say", "[norm][portable]") {
    const shape s{1, 1, 4, 7};
    const auto x = random_rows<double>(s, 1), given = random_rows<double>(s, 2), along = random_rows<double>(s, 3);
    for (const double eps : {1e-12, 100.0}) {
        tensor<double> g(s);
        reference::unit_norm_backward<double>(x.view(), given.view(), g.view(), eps);
        const auto loss = [&](double step) {
            tensor<double> moved(s), out(s);
            for (index_t e = 0; e < s.size(); ++e) moved.data()[e] = x.data()[e] + step * along.data()[e];
            reference::unit_norm<double>(std::as_const(moved).view(), out.view(), eps);
            double sum = 0;
            for (index_t e = 0; e < s.size(); ++e) sum += out.data()[e] * given.data()[e];
            return sum;
        };
        double expected = 0;
        for (index_t e = 0; e < s.size(); ++e) expected += g.data()[e] * along.data()[e];
        CHECK(std::abs((8 * (loss(1e-3) - loss(-1e-3)) - (loss(2e-3) - loss(-2e-3))) / 12e-3 - expected) <= 1e-9);
    }
}

} // namespace attn::testing
