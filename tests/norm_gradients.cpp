// The gradients of layer_norm and rms_norm against their definitions, and those against finite differences.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/reference/norms.hpp>

namespace attn::testing {

namespace {

static_assert(DifferentiableNorm<layer_norm<float>> && DifferentiableNorm<rms_norm<double>>);

template <class N>
inline constexpr bool is_centred = N::adds_bias;

template <Scalar T>
struct all_gradients {
    tensor<T> x;
    std::vector<T> weight, bias;

    all_gradients(const shape& s, bool has_bias)
        : x(s), weight(static_cast<std::size_t>(s.channels), guard<T>), bias(has_bias ? weight.size() : 0, guard<T>) {
        std::fill_n(x.data(), s.size(), guard<T>);
    }
    norm_gradients<T> wanted() { return {x, weight, bias}; }
    friend bool same_bits(const all_gradients& a, const all_gradients& b) {
        const auto same = [](const std::vector<T>& u, const std::vector<T>& v) { return std::ranges::equal(u, v, [](T p, T q) { return testing::same_bits(p, q); }); };
        return testing::same_bits(a.x, b.x) && same(a.weight, b.weight) && same(a.bias, b.bias);
    }
};

template <class N, class T = typename N::scalar>
all_gradients<T> gradients_of(const N& norm, const tensor<T>& x, const tensor<T>& given) {
    all_gradients<T> ours(x.shape(), N::adds_bias);
    backward(norm, x, given, ours.wanted());
    return ours;
}
/// The definition's, in U.
template <Scalar U, class N>
all_gradients<U> defined(const N& norm, const tensor<U>& x, const tensor<U>& given) {
    all_gradients<U> exact(x.shape(), N::adds_bias);
    const std::vector<U> weight(norm.weight.begin(), norm.weight.end());
    reference::row_norm_backward<U>(is_centred<N>, x.view(), given.view(), {exact.x, exact.weight, exact.bias}, weight, static_cast<U>(norm.eps));
    return exact;
}

/// Of both norms, with and without a weight.
template <Scalar T, class F>
void for_each_norm(index_t channels, F&& f) {
    const auto weight = random_numbers<T>(channels, 2, 1, 0.3);
    f(layer_norm<T>{}, "layer_norm");
    f(layer_norm<T>{weight}, "layer_norm with a weight");
    f(rms_norm<T>{}, "rms_norm");
    f(rms_norm<T>{weight}, "rms_norm with a weight");
}

} // namespace

TEST_CASE("norm gradients: the definitions are what finite differences say", "[norm][portable]") {
    const shape s{2, 1, 3, 7};
    const auto x = random_rows<double>(s, 1), given = random_rows<double>(s, 2), along = random_rows<double>(s, 3);
    for_each_norm<double>(7, [&](const auto& norm, const char* name) {
        INFO(name);
        const auto g = defined<double>(norm, x, given);
        const auto loss = [&](double of_x, double of_weight) {
            tensor<double> moved(s), out(s);
            for (index_t e = 0; e < s.size(); ++e) moved.data()[e] = x.data()[e] + of_x * along.data()[e];
            std::vector<double> weight(norm.weight.begin(), norm.weight.end());
            weight.resize(7, 1.0);
            for (std::size_t c = 0; c < weight.size(); ++c) weight[c] += of_weight * along.data()[c];
            if (is_centred<std::remove_cvref_t<decltype(norm)>>) reference::layer_norm<double>(moved.view(), out.view(), weight);
            else reference::rms_norm<double>(moved.view(), out.view(), weight);
            double sum = 0;
            for (index_t e = 0; e < s.size(); ++e) sum += out.data()[e] * given.data()[e];
            return sum;
        };
        constexpr double step = 1e-4;
        double expected = 0, of_weight = 0;
        for (index_t e = 0; e < s.size(); ++e) expected += g.x.data()[e] * along.data()[e];
        for (std::size_t c = 0; c < 7; ++c) of_weight += g.weight[c] * along.data()[c];
        const auto slope = [&](const auto& at) { return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step); };
        CHECK(std::abs(slope([&](double t) { return loss(t, 0); }) - expected) <= 1e-9);
        CHECK(std::abs(slope([&](double t) { return loss(0, t); }) - of_weight) <= 1e-9);
        for (std::size_t c = 0; c < g.bias.size(); ++c) {
            double sum = 0;
            for (index_t row = 0; row < 6; ++row) sum += given.data()[row * 7 + static_cast<index_t>(c)];
            CHECK(std::abs(g.bias[c] - sum) <= 1e-13);
        }
    });
}

TEMPLATE_TEST_CASE("norm gradients: a common offset costs no digits", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto x = random_rows<T>({1, 1, 6, 100}, 3, 1e5), given = random_rows<T>({1, 1, 6, 100}, 4);
    const auto exact = defined<double>(layer_norm<T>{}, reference::widen(x.view()), reference::widen(given.view()));
    CHECK(testing::largest_error(gradients_of(layer_norm<T>{}, x, given).x, exact.x) <= 64 * epsilon<T> * (std::same_as<T, double> ? 1e5 : 1));
}

TEMPLATE_TEST_CASE("norm gradients: the same bits for every executor, layout and choice of what is wanted", "[norm][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const shape s{3, 2, 31, 83};
    const auto x = random_rows<T>(s, 5), given = random_rows<T>(s, 6);
    for_each_norm<T>(83, [&](const auto& norm, const char* name) {
        INFO(name);
        const auto expected = gradients_of(norm, x, given);
        for_each_executor([&](auto& executor, const std::string& on) {
            INFO("on " << on);
            all_gradients<T> ours(s, !expected.bias.empty());
            workspace memory(norm.backward_workspace_bytes(s, std::max<index_t>(1, executor.concurrency())));
            const execution run(executor, memory);
            const auto go = [&] { backward(norm, x, given, ours.wanted(), run); };
            go();
            CHECK(same_bits(ours, expected));
        });
        for (const auto layout : row_layouts) {
            placed<T> from(x, layout), of_out(given, layout), to(s, layout);
            backward(norm, tensor_view<const T>(from.view()), tensor_view<const T>(of_out.view()), {to.view()});
            CHECK(to.guards_intact());
            CHECK(same_bits(to.copy(), expected.x));
        }
        all_gradients<T> some(s, !expected.bias.empty());
        backward(norm, x, given, {.weight = some.weight});
        CHECK(some.weight == expected.weight);
        sequential here;
        workspace memory(norm.backward_workspace_bytes(s, 1));
        const execution run(here, memory);
        CHECK(allocations_in([&] { backward(norm, x, given, some.wanted(), run); }) == 0);
    });
}

TEMPLATE_TEST_CASE("norm gradients: those large enough to be written past the caches have the same bits", "[norm]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const index_t channels = 70, stride = 80, tokens = (index_t{8} << 20) / (channels * sizeof(T)) + 9; // rows that are aligned, and end within a register
    const auto x = random_tensor<T>({1, 1, tokens, channels}, 8), given = random_tensor<T>({1, 1, tokens, channels}, 9);
    for_each_norm<T>(channels, [&](const auto& norm, const char* name) {
        INFO(name);
        tensor<T> rows({1, 1, tokens, stride}), expected(rows.shape());
        for (auto* t : {&rows, &expected}) std::fill_n(t->data(), t->shape().size(), guard<T>);
        thread_pool pool(2);
        backward(norm, x, given, {.x = tensor_view<T>(rows.data(), x.shape(), {0, 0, stride, 1})}, pool);
        const auto ours = gradients_of(norm, x, given); // rows that are not aligned
        for (index_t i = 0; i < tokens; ++i) std::copy_n(ours.x.data() + i * channels, channels, expected.data() + i * stride);
        CHECK(testing::same_bits(rows, expected));
    });
}

TEMPLATE_TEST_CASE("norm gradients: a row that holds NaN spoils its own gradient, and the sums", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    auto x = random_rows<T>({1, 1, 5, 37}, 7);
    const auto given = random_rows<T>({1, 1, 5, 37}, 8);
    const layer_norm<T> norm;
    const auto before = gradients_of(norm, x, given);
    x(0, 0, 2, 36) = std::numeric_limits<T>::quiet_NaN();
    const auto after = gradients_of(norm, x, given);
    for (index_t i = 0; i < 5; ++i)
        for (index_t c = 0; c < 37; ++c) CHECK((i == 2 ? std::isnan(after.x(0, 0, i, c)) : testing::same_bits(after.x(0, 0, i, c), before.x(0, 0, i, c))));
    CHECK(std::isnan(after.weight[0]));
    CHECK(after.bias == before.bias);
}

TEST_CASE("norm gradients: what is wrong is refused, by name", "[norm]") {
    const shape s{1, 2, 3, 8};
    tensor<float> x(s), given(s), to(s), small({1, 2, 3, 7});
    std::vector<float> weight(8), few(7);
    const layer_norm<float> norm{weight};
    const auto refused = [&](const auto& which, const tensor_view<const float>& from, const norm_gradients<float>& wanted, const std::vector<std::string>& parts) {
        check_says(error_of([&] { backward(which, x, from, wanted); }), parts);
    };
    refused(norm, small, {to}, {"layer_norm", "d_out", "(1, 2, 3, 7)", "(1, 2, 3, 8)"});
    refused(norm, given, {small}, {"wanted.x", "(1, 2, 3, 7)"});
    refused(norm, given, {given}, {"wanted.x", "overlaps d_out"});
    refused(norm, given, {to, few}, {"wanted.weight", "(1, 1, 1, 7)"});
    refused(norm, given, {.weight = weight}, {"wanted.weight", "overlaps weight"});
    refused(norm, given, {.x = to, .weight = std::span(to.data(), 8)}, {"wanted.weight", "overlaps wanted.x"});
    std::vector<float> bias(8);
    refused(rms_norm<float>{}, given, {.bias = bias}, {"rms_norm", "wanted.bias", "no bias"});
    sequential here;
    workspace memory(norm.backward_workspace_bytes(s, 1) - 1);
    check_says(error_of([&] { backward(norm, x, given, {to}, execution(here, memory)); }), {"layer_norm", "workspace"});
}

} // namespace attn::testing
