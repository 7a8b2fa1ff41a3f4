// Feature maps of whole vectors: what they are of one token, and linear attention with them against its definition.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/attention/cosformer_features.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/performer_features.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/vector_linear_attention.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// A map of a user's own: products of neighbours, and one more that knows the position.
struct neighbours {
    index_t features(index_t channels) const { return channels + 1; }
    template <class S>
    void operator()(std::span<const S> x, index_t position, std::span<S> to) const {
        for (std::size_t c = 0; c < x.size(); ++c) to[c] = x[c] * x[c] + x[(c + 1) % x.size()] * x[(c + 1) % x.size()];
        to[x.size()] = S(1) / static_cast<S>(1 + (position < 0 ? -position : position) % 8);
    }
    template <class S>
    void gradient(std::span<const S> x, index_t, std::span<const S> of_features, std::span<S> to) const {
        for (std::size_t c = 0; c < x.size(); ++c) to[c] = S(2) * x[c] * (of_features[c] + of_features[(c + x.size() - 1) % x.size()]);
    }
};
static_assert(VectorFeatureMap<neighbours> && VectorFeatureMap<cosformer_features> && VectorFeatureMap<performer_features<float>>);
static_assert(!FeatureMap<neighbours> && !VectorFeatureMap<relu> && DifferentiableAttention<linear_attention<neighbours>>);

template <Scalar T>
tensor<T> directions_of(index_t features, index_t channels) {
    tensor<T> w({1, 1, features, channels});
    fill_orthogonal_directions(w.view(), 3);
    return w;
}

template <Scalar T>
struct vector_problem {
    tensor<T> q, k, v, given;
    positions where;

    vector_problem(const input_shapes& s, const positions& at)
        : q(random_rows<T>(s.queries, 1, 0, 0.7)), k(random_rows<T>(s.keys, 2, 0, 0.7)), v(random_rows<T>(s.values, 3)),
          given(random_rows<T>({s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}, 4)), where(at) {}
    inputs<T> in() const { return {q, k, v, where}; }
};

/// Results and gradients, against the definition in double, on every executor.
template <class Op, Scalar T>
void check_defined(const Op& op, const vector_problem<T>& p, bool causal) {
    const auto q = reference::widen(p.q.view()), k = reference::widen(p.k.view()), v = reference::widen(p.v.view()), given = reference::widen(p.given.view());
    const inputs<double> wide{q, k, v, p.where};
    tensor<double> exact(p.given.shape()), exact_q(p.q.shape()), exact_k(p.k.shape()), exact_v(p.v.shape());
    reference::vector_linear_attention<double>(wide, outputs<double>{exact}, op.feature_map, op.pattern, causal, op.normalise, op.eps, op.scale);
    reference::vector_linear_gradients<double>(wide, given, {exact_q, exact_k, exact_v}, op.feature_map, op.pattern, causal, op.normalise, op.eps, op.scale);
    tensor<T> first_out, first_q, first_k, first_v;
    const auto near = [](const tensor<T>& ours, const tensor<double>& expected) {
        CHECK(largest_error(ours, expected) <= 400 * epsilon<T> * std::max(1.0, largest_magnitude(expected)));
    };
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        tensor<T> out(exact.shape()), of_q(p.q.shape()), of_k(p.k.shape()), of_v(p.v.shape());
        attend(op, p.in(), outputs<T>{out}, executor);
        backward(op, p.in(), {out}, {p.given}, {of_q, of_k, of_v}, executor);
        near(out, exact), near(of_q, exact_q), near(of_k, exact_k), near(of_v, exact_v);
        if (!first_out.data()) first_out = std::move(out), first_q = std::move(of_q), first_k = std::move(of_k), first_v = std::move(of_v);
        else CHECK((same_bits(out, first_out) && same_bits(of_q, first_q) && same_bits(of_k, first_k) && same_bits(of_v, first_v)));
    });
}

} // namespace

TEMPLATE_TEST_CASE("vector features: linear attention is what its definition says, with every map and pattern", "[linear][portable][arithmetic]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<index_t> length{28, 0};
    for (const auto& [channels, features] : {std::array<index_t, 2>{5, 19}, {16, 40}, {33, 8}}) {
        INFO(channels << " channels");
        const auto w = directions_of<T>(features, channels);
        const vector_problem<T> p({{2, 4, 37, channels}, {2, 2, 300, channels}, {2, 2, 300, 7}}, {.first_query = 250, .first_key = -3});
        const performer_features performer{w};
        const cosformer_features cosformer{.length = 350};
        const auto with_patterns = [&](const auto& map) {
            check_defined(linear_attention{.feature_map = map}, p, false);
            check_defined(linear_attention{.feature_map = map, .pattern = causal{}}, p, true);
            check_defined(linear_attention{.feature_map = map, .pattern = lengths{length}, .normalise = false, .scale = 0.125}, p, false);
            check_defined(linear_attention{.feature_map = map, .pattern = prefix{5}}, p, true);
        };
        with_patterns(performer);
        with_patterns(cosformer);
        with_patterns(neighbours{});
    }
}

TEST_CASE("vector features: a map's gradient is what finite differences say, a maximum being constant", "[linear][portable]") {
    const auto w = directions_of<double>(13, 6);
    const performer_features performer{w};
    const auto check = [](const auto& features, const auto& gradient, index_t count) {
        const auto x = random_numbers<double>(6, 1), along = random_numbers<double>(6, 2), given = random_numbers<double>(count, 3);
        std::vector<double> to(6);
        gradient(std::span<const double>(x), std::span<const double>(given), std::span<double>(to));
        double expected = 0;
        for (std::size_t c = 0; c < 6; ++c) expected += to[c] * along[c];
        const auto loss = [&](double step) {
            auto moved = x;
            for (std::size_t c = 0; c < 6; ++c) moved[c] += step * along[c];
            std::vector<double> f(static_cast<std::size_t>(count));
            features(std::span<const double>(moved), std::span<double>(f));
            double sum = 0;
            for (std::size_t r = 0; r < f.size(); ++r) sum += f[r] * given[r];
            return sum;
        };
        CHECK(std::abs((8 * (loss(1e-4) - loss(-1e-4)) - (loss(2e-4) - loss(-2e-4))) / 12e-4 - expected) <= 1e-9 * (1 + std::abs(expected)));
    };
    const auto by_itself = [&](const auto& map) {
        check([&](auto x, auto to) { map(x, 5, to); }, [&](auto x, auto given, auto to) { map.gradient(x, 5, given, to); }, map.features(6));
    };
    by_itself(cosformer_features{.length = 11});
    by_itself(neighbours{});
    check([&](auto x, auto to) { performer(x, 0, 0.75, to); }, [&](auto x, auto given, auto to) { performer.gradient(x, 0, 0.75, given, to); }, 13);
}

TEST_CASE("cosformer_features: weights are relu's, times the cosine of the distance", "[linear][portable]") {
    const cosformer_features phi{.length = 100};
    const auto x = random_numbers<double>(8, 1), y = random_numbers<double>(8, 2);
    double plain = 0;
    for (std::size_t c = 0; c < 8; ++c) plain += std::max(x[c], 0.0) * std::max(y[c], 0.0);
    for (const auto& [i, j] : {std::array<index_t, 2>{0, 0}, {7, 3}, {99, 0}, {-40, 30}, {1'000'000'000'050, 1'000'000'000'000}}) {
        std::vector<double> f(16), e(16);
        phi(std::span<const double>(x), i, std::span<double>(f));
        phi(std::span<const double>(y), j, std::span<double>(e));
        double weight = 0;
        for (std::size_t c = 0; c < 16; ++c) weight += f[c] * e[c];
        CHECK(std::abs(weight - plain * std::cos(std::numbers::pi * static_cast<double>(i - j) / 200)) <= 1e-13);
    }
}

TEMPLATE_TEST_CASE("performer_features: softmax's weights on average, whatever the size of a query", "[linear][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto w = directions_of<T>(4096, 16);
    vector_problem<T> p({{1, 2, 20, 16}, {1, 2, 30, 16}, {1, 2, 30, 8}}, top_left());
    const auto error_of_softmax = [&](const auto& pattern) {
        tensor<T> ours(p.given.shape());
        tensor<double> exact(p.given.shape());
        attend(linear_attention{.feature_map = performer_features{w}, .pattern = pattern}, p.in(), outputs<T>{ours});
        const auto q = reference::widen(p.q.view()), k = reference::widen(p.k.view()), v = reference::widen(p.v.view());
        reference::softmax<double>(inputs<double>{q, k, v, p.where}, {exact.view()}, {}, identity_score{}, pattern);
        return largest_error(ours, exact);
    };
    for (auto* t : {&p.q, &p.k})
        for (index_t e = 0; e < t->shape().size(); ++e) t->data()[e] *= T(0.5);
    CHECK(error_of_softmax(dense{}) < 0.05);
    CHECK(error_of_softmax(causal{}) < 0.1);
    // Queries and keys whose exponentials no number holds: maxima keep them finite.
    for (auto* t : {&p.q, &p.k})
        for (index_t e = 0; e < t->shape().size(); ++e) t->data()[e] *= T(2000);
    tensor<T> large(p.given.shape());
    attend(linear_attention{.feature_map = performer_features{w}}, p.in(), outputs<T>{large});
    CHECK(std::all_of(large.data(), large.data() + large.shape().size(), [](T x) { return std::isfinite(x); }));
}

TEMPLATE_TEST_CASE("performer_features: keys that are not seen have no part in the maximum", "[linear][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto w = directions_of<T>(24, 8);
    const std::vector<index_t> length{19};
    vector_problem<T> p({{1, 2, 20, 8}, {1, 1, 30, 8}, {1, 1, 30, 8}}, top_left());
    const auto run = [&](const auto& op) {
        tensor<T> out(p.given.shape());
        attend(op, p.in(), outputs<T>{out});
        std::vector<tensor<T>> all;
        for (const auto& s : {p.q.shape(), p.k.shape(), p.v.shape()}) all.emplace_back(s);
        backward(op, p.in(), {out}, {p.given}, {all[0], all[1], all[2]});
        all.push_back(std::move(out));
        return all;
    };
    const linear_attention padded{.feature_map = performer_features{w}, .pattern = lengths{length}};
    const linear_attention later{.feature_map = performer_features{w}, .pattern = causal{}};
    const auto a = run(padded), b = run(later);
    for (index_t j = 20; j < 30; ++j) std::fill_n(p.k.view().row(0, 0, j), 8, j == 25 ? std::numeric_limits<T>::quiet_NaN() : T(1e6));
    const auto c = run(padded), d = run(later);
    for (std::size_t t = 0; t < 4; ++t) CHECK((same_bits(a[t], c[t]) && same_bits(b[t], d[t])));
}

TEST_CASE("fill_orthogonal_directions: orthogonal d by d, as long as normal rows, and the same for a seed", "[linear][portable]") {
    const auto w = directions_of<double>(40, 16), again = directions_of<double>(40, 16);
    CHECK(same_bits(w, again));
    double squares = 0;
    for (index_t r = 0; r < 40; ++r)
        for (index_t s = 0; s < 40; ++s) {
            double product = 0;
            for (index_t c = 0; c < 16; ++c) product += w(0, 0, r, c) * w(0, 0, s, c);
            if (r == s) squares += product / 40;
            else if (r / 16 == s / 16) CHECK(std::abs(product) <= 1e-12);
        }
    CHECK((squares > 12 && squares < 20)); // 16 on average
    tensor<float> other({1, 1, 40, 16});
    fill_orthogonal_directions(other.view(), 4);
    CHECK(other(0, 0, 0, 0) != static_cast<float>(w(0, 0, 0, 0)));
}

TEST_CASE("vector features: what is wrong is refused, by name", "[linear]") {
    tensor<float> q({1, 1, 4, 8}), out(q.shape()), narrow({1, 1, 9, 7}), w({1, 1, 4, 8}), two({1, 2, 4, 8});
    const inputs<float> in{q, q, q};
    const auto refused = [&](const auto& map, const tensor_view<float>& to, const std::vector<std::string>& parts) {
        check_says(error_of([&] { attend(linear_attention{.feature_map = map}, in, outputs<float>{to}); }), parts);
    };
    refused(performer_features{narrow}, out, {"linear_attention", "feature_map.directions", "(1, 1, 9, 7)", "(1, 1, features, 8)"});
    refused(performer_features{two}, out, {"feature_map.directions", "(1, 2, 4, 8)"});
    refused(performer_features<float>{}, out, {"feature_map.directions"});
    refused(performer_features{w}, w.view(), {"linear_attention", "overlaps feature_map.directions"});
    refused(cosformer_features{.length = 0}, out, {"linear_attention", "feature_map.length", "is 0"});
}

} // namespace attn::testing
