// The gradients of batch_norm, rep_batch_norm and progressive_rep_batch_norm, of training steps and in inference.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/reference/norms.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
struct rep_gradients {
    tensor<T> x;
    std::vector<T> weight, bias, eta;

    explicit rep_gradients(const shape& s) : x(s), weight(static_cast<std::size_t>(s.channels), guard<T>), bias(weight), eta(1, guard<T>) {
        std::fill_n(x.data(), s.size(), guard<T>);
    }
    attn::rep_norm_gradients<T> wanted() { return {{x, weight, bias}, eta}; }
    friend bool same_bits(const rep_gradients& a, const rep_gradients& b) {
        const auto same = [](const std::vector<T>& u, const std::vector<T>& v) { return std::ranges::equal(u, v, [](T p, T q) { return testing::same_bits(p, q); }); };
        return testing::same_bits(a.x, b.x) && same(a.weight, b.weight) && same(a.bias, b.bias) && same(a.eta, b.eta);
    }
};

/// One step's tensors. Every third token does not count, if there is a mask.
template <Scalar T>
struct step {
    shape size;
    tensor<T> x, given;
    std::vector<T> weight;
    tensor<bool> tokens;
    bool masked;

    step(const shape& s, bool with_mask)
        : size(s), x(random_rows<T>(s, 1, 0.5)), given(random_rows<T>(s, 2)), weight(random_numbers<T>(s.channels, 3, 1, 0.3)), tokens({s.batch, 1, s.tokens, 1}),
          masked(with_mask) {
        for (index_t e = 0; e < tokens.shape().size(); ++e) tokens.data()[e] = e % 3 != 1;
    }
    token_mask mask() const { return masked ? token_mask(tokens) : token_mask(); }
};

template <Scalar T, class E>
rep_gradients<T> ours_on(const step<T>& s, double eta, E& executor) {
    rep_gradients<T> ours(s.size);
    const rep_batch_norm<T> norm{{.weight = s.weight}, eta};
    workspace memory(train_backward_workspace_bytes(norm, s.size, executor));
    train_backward(norm, s.x, s.given, ours.wanted(), execution(executor, memory), s.mask());
    return ours;
}
template <Scalar T>
rep_gradients<T> ours_of(const step<T>& s, double eta) {
    sequential here;
    return ours_on(s, eta, here);
}
/// The definition's, in U, of what is given as U.
template <Scalar U, Scalar T>
rep_gradients<U> defined(const step<T>& s, double eta) {
    const auto as = [](const tensor<T>& from) {
        tensor<U> to(from.shape());
        std::transform(from.data(), from.data() + from.shape().size(), to.data(), [](T v) { return static_cast<U>(v); });
        return to;
    };
    const auto x = as(s.x), given = as(s.given);
    const std::vector<U> weight(s.weight.begin(), s.weight.end());
    rep_gradients<U> exact(s.size);
    reference::rep_batch_norm_backward<U>(x.view(), given.view(), {exact.x, exact.weight, exact.bias, exact.eta.data()}, weight, static_cast<U>(eta), U(1e-5), s.mask());
    return exact;
}

} // namespace

TEST_CASE("training gradients: the definition is what finite differences say", "[norm][portable]") {
    for (const bool masked : {false, true}) {
        INFO((masked ? "with a mask" : "without a mask"));
        const shape s{2, 2, 6, 3};
        const step<double> given(s, masked);
        const auto along = random_rows<double>(s, 7);
        constexpr double eta = 0.7;
        const auto g = defined<double>(given, eta);
        const auto loss = [&](double of_x, double of_weight, double of_eta) {
            tensor<double> x(s), out(s);
            for (index_t e = 0; e < s.size(); ++e) x.data()[e] = given.x.data()[e] + of_x * along.data()[e];
            auto weight = given.weight;
            for (std::size_t c = 0; c < weight.size(); ++c) weight[c] += of_weight * along.data()[c];
            const reference::channel_statistics<double> seen(x.view(), given.mask());
            const std::vector<double> bias{0.1, 0.2, 0.3};
            reference::rep_batch_norm<double>(x.view(), out.view(), seen.mean, seen.variance, weight, bias, eta + of_eta, 1e-5, given.mask());
            double sum = 0;
            for (index_t e = 0; e < s.size(); ++e) sum += out.data()[e] * given.given.data()[e];
            return sum;
        };
        constexpr double h = 1e-3;
        const auto slope = [&](const auto& at) { return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h); };
        double of_x = 0, of_weight = 0;
        for (index_t e = 0; e < s.size(); ++e) of_x += g.x.data()[e] * along.data()[e];
        for (std::size_t c = 0; c < 3; ++c) of_weight += g.weight[c] * along.data()[c];
        CHECK(std::abs(slope([&](double t) { return loss(t, 0, 0); }) - of_x) <= 1e-8);
        CHECK(std::abs(slope([&](double t) { return loss(0, t, 0); }) - of_weight) <= 1e-9);
        CHECK(std::abs(slope([&](double t) { return loss(0, 0, t); }) - g.eta[0]) <= 1e-9);
    }
}

TEMPLATE_TEST_CASE("training gradients: the same bits for every executor, layout and choice of what is wanted", "[norm][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const shape size{3, 2, 95, 45};
    for (const bool masked : {false, true}) {
        const step<T> s(size, masked);
        const auto expected = ours_of(s, 0.7);
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO("on " << name);
            CHECK(same_bits(ours_on(s, 0.7, executor), expected));
        });
        const rep_batch_norm<T> norm{{.weight = s.weight}, 0.7};
        sequential here;
        workspace memory(train_backward_workspace_bytes(norm, size));
        const execution run(here, memory);
        for (const auto layout : row_layouts) {
            placed<T> x(s.x, layout), given(s.given, layout), to(size, layout);
            train_backward(norm, x.view(), given.view(), {{to.view()}}, run, s.mask());
            CHECK(to.guards_intact());
            CHECK(same_bits(to.copy(), expected.x));
        }
        rep_gradients<T> some(size);
        train_backward(norm, s.x, s.given, {{.bias = some.bias}}, run, s.mask());
        CHECK(some.bias == expected.bias);
        CHECK(testing::same_bits(some.weight[0], guard<T>));
        CHECK(allocations_in([&] { train_backward(norm, s.x, s.given, some.wanted(), run, s.mask()); }) == 0);
    }
}

TEMPLATE_TEST_CASE("training gradients: batch_norm is rep_batch_norm with an eta of 0", "[norm]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const step<T> s({2, 1, 30, 11}, true);
    const auto expected = ours_of(s, 0);
    rep_gradients<T> ours(s.size);
    const batch_norm<T> norm{.weight = s.weight};
    sequential here;
    workspace memory(train_backward_workspace_bytes(norm, s.size));
    train_backward(norm, s.x, s.given, {ours.x, ours.weight, ours.bias}, execution(here, memory), s.mask());
    CHECK((testing::same_bits(ours.x, expected.x) && ours.weight == expected.weight && ours.bias == expected.bias));
}

TEMPLATE_TEST_CASE("training gradients: progressive_rep_batch_norm shares them between its norms", "[norm][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const step<T> s({2, 1, 30, 11}, true);
    const progressive_rep_batch_norm<layer_norm<T>> norm{{s.weight}, {{.weight = s.weight}, 0.7}};
    sequential here;
    workspace memory(train_backward_workspace_bytes(norm, s.size));
    tensor<T> of_norm(s.size);
    std::vector<T> of_norm_weight(11), of_norm_bias(11);
    backward(norm.norm, s.x, s.given, {of_norm, of_norm_weight, of_norm_bias});
    const auto of_rep = ours_of(s, 0.7);
    const auto near = [](T ours, double expected) { return std::abs(static_cast<double>(ours) - expected) <= 64 * epsilon<T> * (1 + std::abs(expected)); };
    for (const double gamma : {1.0, 0.6, 0.0}) {
        INFO("gamma " << gamma);
        rep_gradients<T> ours(s.size);
        std::vector<T> weight(11), bias(11);
        train_backward(norm, s.x, s.given, {ours.x, {{}, weight, bias}, {{{}, ours.weight, ours.bias}, ours.eta}}, gamma, execution(here, memory), s.mask());
        bool right = near(ours.eta[0], (1 - gamma) * static_cast<double>(of_rep.eta[0]));
        for (index_t e = 0; e < s.size.size(); ++e)
            right = right && near(ours.x.data()[e], gamma * static_cast<double>(of_norm.data()[e]) + (1 - gamma) * static_cast<double>(of_rep.x.data()[e]));
        for (std::size_t c = 0; c < 11; ++c) {
            right = right && near(ours.weight[c], (1 - gamma) * static_cast<double>(of_rep.weight[c])) && near(ours.bias[c], (1 - gamma) * static_cast<double>(of_rep.bias[c]));
            right = right && near(weight[c], gamma * static_cast<double>(of_norm_weight[c])) && near(bias[c], gamma * static_cast<double>(of_norm_bias[c]));
        }
        CHECK(right);
    }
    rep_gradients<T> ours(s.size);
    train_backward(norm, s.x, s.given, {ours.x, {}, {{{}, ours.weight, ours.bias}, ours.eta}}, {}, execution(here, memory), s.mask());
    CHECK(testing::same_bits(ours.x, of_norm));
    CHECK((ours.eta[0] == 0 && ours.weight == std::vector<T>(11, T{0}) && ours.bias == std::vector<T>(11, T{0})));
}

namespace {

/// What a norm in inference has beside a step.
struct running_statistics {
    std::vector<double> mean, variance;

    explicit running_statistics(index_t channels) : mean(random_numbers<double>(channels, 4, 0.5)), variance(random_numbers<double>(channels, 5, 2, 0.3)) {}
    template <Scalar T>
    rep_batch_norm<T> norm(const step<T>& s, double eta) const {
        return {{.weight = s.weight, .mean = mean, .variance = variance}, eta};
    }
};

} // namespace

TEST_CASE("gradients of norms in inference: the definition is what finite differences say", "[norm][portable]") {
    const step<double> s({2, 2, 6, 3}, false);
    const running_statistics seen(3);
    const auto along = random_rows<double>(s.size, 7);
    rep_gradients<double> g(s.size);
    reference::rep_batch_norm_backward<double>(s.x.view(), s.given.view(), {g.x, g.weight, g.bias, g.eta.data()}, s.weight, 0.7, 1e-5, {}, seen.mean, seen.variance);
    const auto loss = [&](double of_x, double of_weight, double of_eta) {
        tensor<double> x(s.size), out(s.size);
        for (index_t e = 0; e < s.size.size(); ++e) x.data()[e] = s.x.data()[e] + of_x * along.data()[e];
        auto weight = s.weight;
        for (std::size_t c = 0; c < weight.size(); ++c) weight[c] += of_weight * along.data()[c];
        reference::rep_batch_norm<double>(x.view(), out.view(), seen.mean, seen.variance, weight, {}, 0.7 + of_eta);
        return std::inner_product(out.data(), out.data() + s.size.size(), s.given.data(), 0.0);
    };
    const auto slope = [&](const auto& at) { return (at(0.5) - at(-0.5)); }; // all of them are lines
    double of_x = 0, of_weight = 0;
    for (index_t e = 0; e < s.size.size(); ++e) of_x += g.x.data()[e] * along.data()[e];
    for (std::size_t c = 0; c < 3; ++c) of_weight += g.weight[c] * along.data()[c];
    CHECK(std::abs(slope([&](double t) { return loss(t, 0, 0); }) - of_x) <= 1e-12);
    CHECK(std::abs(slope([&](double t) { return loss(0, t, 0); }) - of_weight) <= 1e-12);
    CHECK(std::abs(slope([&](double t) { return loss(0, 0, t); }) - g.eta[0]) <= 1e-12);
}

TEMPLATE_TEST_CASE("gradients of norms in inference: the definition's, the same bits for every executor, and of a whole tensor and its parts", "[norm][portable][parallel]",
                   ATTN_TEST_NUMBERS) {
    using T = TestType;
    const shape size{3, 2, 95, 45};
    const step<T> s(size, false);
    const running_statistics seen(45);
    const auto norm = seen.norm(s, 0.7);
    const auto ours_by = [&](const auto& of, const tensor_view<const T>& x, auto& executor) {
        rep_gradients<T> ours(size);
        if constexpr (std::same_as<std::remove_cvref_t<decltype(of)>, batch_norm<T>>) backward(of, x, s.given, {ours.x, ours.weight, ours.bias}, executor);
        else backward(of, x, s.given, ours.wanted(), executor);
        return ours;
    };
    sequential here;
    const auto expected = ours_by(norm, s.x, here);
    rep_gradients<double> exact(size);
    const auto x = reference::widen(s.x.view()), given = reference::widen(s.given.view());
    const std::vector<double> weight(s.weight.begin(), s.weight.end());
    reference::rep_batch_norm_backward<double>(x.view(), given.view(), {exact.x, exact.weight, exact.bias, exact.eta.data()}, weight, 0.7, 1e-5, {}, seen.mean, seen.variance);
    const auto near = [](T a, double b, double terms) { return std::abs(static_cast<double>(a) - b) <= 8 * terms * epsilon<T>; };
    bool right = near(expected.eta[0], exact.eta[0], static_cast<double>(size.size()));
    for (index_t e = 0; e < size.size(); ++e) right = right && near(expected.x.data()[e], exact.x.data()[e], 8);
    for (std::size_t c = 0; c < 45; ++c) right = right && near(expected.weight[c], exact.weight[c], 600) && near(expected.bias[c], exact.bias[c], 600);
    CHECK(right);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO("on " << name);
        CHECK(same_bits(ours_by(norm, s.x, executor), expected));
    });
    const progressive_rep_batch_norm<layer_norm<T>> progressive{{}, norm};
    CHECK(same_bits(ours_by(progressive, s.x, here), expected));
    const auto plain = ours_by(norm.batch, s.x, here), without = ours_by(seen.norm(s, 0), s.x, here);
    CHECK((testing::same_bits(plain.x, without.x) && plain.weight == without.weight && plain.bias == without.bias));

    tensor<T> broken = random_rows<T>(size, 1, 0.5); // what the gradient of x does not read, and only a channel of those of the parameters does
    broken(1, 1, 7, 3) = std::numeric_limits<T>::quiet_NaN();
    const auto of_broken = ours_by(norm, broken, here);
    CHECK(testing::same_bits(of_broken.x, expected.x));
    CHECK((std::isnan(of_broken.weight[3]) && of_broken.weight[4] == expected.weight[4] && of_broken.bias == expected.bias));
}

TEMPLATE_TEST_CASE("gradients of norms in inference: through the statistics where these are those of the tokens", "[norm]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const step<T> s({2, 1, 30, 11}, false);
    const rep_batch_norm<T> norm{{.weight = s.weight, .batch_statistics = true}, 0.7};
    rep_gradients<T> ours(s.size);
    backward(norm, s.x, s.given, ours.wanted());
    CHECK(same_bits(ours, ours_of(s, 0.7)));
    const rep_batch_norm<T> neither{{.weight = s.weight}, 0.7};
    check_says(error_of([&] { backward(neither, s.x, s.given, ours.wanted()); }), {"rep_batch_norm", "mean", "is missing"});
    std::vector<T> two(2);
    check_says(error_of([&] { backward(norm, s.x, s.given, {{ours.x}, two}); }), {"rep_batch_norm", "wanted.eta"});
}

TEST_CASE("training gradients: what is wrong is refused, by name", "[norm]") {
    const step<float> s({1, 1, 5, 8}, false);
    const rep_batch_norm<float> norm{{.weight = s.weight}, 1};
    sequential here;
    workspace memory(train_backward_workspace_bytes(norm, s.size));
    const execution run(here, memory);
    rep_gradients<float> to(s.size);
    std::vector<float> two(2);
    const auto refused = [&](const rep_norm_gradients<float>& wanted, const token_mask& mask, const std::vector<std::string>& parts) {
        check_says(error_of([&] { train_backward(norm, s.x, s.given, wanted, run, mask); }), parts);
    };
    refused({{to.x}, two}, {}, {"rep_batch_norm", "wanted.eta", "(1, 1, 1, 2), but (1, 1, 1, 1)"});
    refused({{to.x}, std::span(to.x.data(), 1)}, {}, {"wanted.eta", "overlaps wanted.x"});
    refused({{.weight = two}}, {}, {"wanted.weight", "(1, 1, 1, 2)"});
    tensor<bool> none({1, 1, 5, 1}), wrong({1, 1, 4, 1});
    refused({{to.x}}, none, {"rep_batch_norm", "0 tokens that count"});
    refused({{to.x}}, wrong, {"mask", "(1, 1, 4, 1)"});
    const progressive_rep_batch_norm<layer_norm<float>> progressive{{}, norm};
    check_says(error_of([&] { train_backward(progressive, s.x, s.given, {.x = to.x}, 1.5, run); }), {"progressive_rep_batch_norm", "gamma", "1.5"});
    check_says(error_of([&] { train_backward(progressive, s.x, s.given, {.norm = {.weight = to.weight}, .rep = {{.weight = to.weight}}}, 0.5, run); }),
               {"progressive_rep_batch_norm", "wanted.rep.weight", "overlaps wanted.norm.weight"});
    workspace small(train_backward_workspace_bytes(norm, s.size) - 1);
    check_says(error_of([&] { train_backward(norm, s.x, s.given, to.wanted(), execution(here, small)); }), {"rep_batch_norm", "workspace"});
}

} // namespace attn::testing
