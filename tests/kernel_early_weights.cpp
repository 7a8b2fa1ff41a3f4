// Weights that are measured from an earlier maximum: where sums stay in range, where the maximum rises afterwards, and where it is all
// redone.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/early_weights.hpp>

namespace attn::testing {

namespace {

constexpr index registers = 2, rows = 7;

/// A panel's state after a tile of scores of 0, and how it takes in another tile.
template <Scalar T>
struct early_panel {
    using state_type = kernel::online_softmax<T, simd::native>;
    using weights_type = kernel::early_weights<T, simd::native>;
    static constexpr index queries = registers * state_type::lanes::size;
    using tile = std::vector<T>; ///< [rows][queries]

    workspace memory{4096 * sizeof(T)};
    attn::detail::scratch scratch{memory.bytes().data()};
    state_type state = state_type::take(scratch, registers, 0);
    weights_type weights{scratch, queries};
    int attempts = 0; ///< of the last tile

    early_panel() {
        state.reset(registers);
        push(tile(rows * queries, T{0}), tile(rows * queries, T{0}));
    }
    /// The weights of scores + added.
    tile push(const tile& scores, const tile& added) {
        weights.begin(state, true);
        for (attempts = 1;; ++attempts) {
            auto x = scores;
            if (weights.at_once()) {
                weights.add(state, x.data(), rows, {added.data(), queries});
                weights.template finish<true>();
            } else {
                std::transform(x.begin(), x.end(), added.begin(), x.begin(), std::plus{});
                state.raise_maximum(x.data(), rows);
                weights.choose_maxima(state);
                state.push_scores(x.data(), rows);
            }
            if (weights.settle(state, x.data(), rows)) return x;
        }
    }
};

template <Scalar T>
std::vector<T> random_tile(unsigned seed) {
    const auto numbers = random_tensor<T>({.tokens = 1, .channels = rows * early_panel<T>::queries}, seed, T{3});
    return {numbers.data(), numbers.data() + numbers.shape().size()};
}

} // namespace

TEMPLATE_TEST_CASE("early_weights: with one high score, they are the softmax all the same", "[kernel][portable]", float, double) {
    using T = TestType;
    using panel_type = early_panel<T>;
    constexpr auto possible = panel_type::weights_type::possible;
    const auto scores = random_tile<T>(1), added = random_tile<T>(2);
    panel_type plain;
    CHECK(plain.state.maximum[0] == 0);
    const auto plain_weights = plain.push(scores, added);
    CHECK(plain.attempts == 1);
    // Query 3 sees one high score: its sum stays below 2^24, passes 2^24, passes 2^100.
    for (const double high : {10.0, 23.0, 25.5, 60.0, 99.0, 100.5, 1000.0}) {
        INFO("a score of " << high);
        panel_type panel;
        auto x = scores, y = added;
        x[2 * panel.queries + 3] = static_cast<T>(high / 2);
        y[2 * panel.queries + 3] = static_cast<T>(high / 2);
        const auto weights = panel.push(x, y);
        CHECK(panel.attempts == (possible && high > 100 ? 2 : 1));
        if (possible) CHECK(static_cast<double>(panel.state.maximum[3]) == (high < 24 ? 0.0 : high > 100 ? high : std::floor(high)));
        for (index q = 0; q < panel.queries; ++q) {
            const auto m = static_cast<double>(panel.state.maximum[q]);
            double sum = rows * std::exp2(-m); // of the first tile
            CHECK(std::abs(static_cast<double>(panel.state.factor[q]) - std::exp2(-m)) <= 8 * epsilon<T>);
            for (index j = 0; j < rows; ++j) {
                const auto at = static_cast<std::size_t>(j * panel.queries + q);
                const auto exact = std::exp2(static_cast<double>(x[at] + y[at]) - m);
                CHECK(std::abs(static_cast<double>(weights[at]) - exact) <= (8 + std::abs(std::log2(exact))) * epsilon<T> * exact + 1e-37);
                if (q != 3) CHECK(same_bits(weights[at], plain_weights[at])); // no query notices another
                sum += exact;
            }
            CHECK(std::abs(static_cast<double>(panel.state.sum[q]) - sum) <= 16 * epsilon<T> * sum);
            CHECK(static_cast<double>(panel.state.sum[q]) <= 0x1p25);
        }
    }
}

TEMPLATE_TEST_CASE("early_weights: measured from the maximum of the first keys", "[kernel][portable]", float, double) {
    using T = TestType;
    using panel_type = early_panel<T>;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    constexpr auto possible = panel_type::weights_type::possible;
    constexpr index first = 2;
    for (const T low : {T{0}, T{39}, T{41}, infinity}) { // how far a score of query 1 lies below its first
        INFO("a score lower by " << low);
        auto x = random_tile<T>(1);
        x[1] = T{1};
        x[panel_type::queries + 1] = T{1} - low;
        if (low == infinity) x[1] = -infinity, x[0] = x[panel_type::queries] = nan;
        const auto waits = [&](index q) { return (q == 1 && low > 40) || (q == 0 && low == infinity); };
        panel_type panel;
        panel.weights.begin(panel.state, true);
        CHECK_FALSE(panel.weights.asks_first_keys()); // all know an m
        panel.state.reset(registers);
        panel.state.maximum[5] = panel.state.next_maximum[5] = T{7}; // but for one, nobody does
        panel.weights.begin(panel.state, true);
        CHECK(panel.weights.asks_first_keys() == possible);
        if (!possible) return;
        panel.state.raise_maximum(x.data(), first);
        if (low == 0) {
            panel.weights.measure_from_first_keys(panel.state, x.data(), first);
        } else { // scores in two parts
            std::vector<T> part(x.size()), rest(x.size());
            for (std::size_t i = 0; i < x.size(); ++i) rest[i] = x[i] - (part[i] = T{2} * static_cast<T>(i % 5));
            panel.weights.measure_from_first_keys(panel.state, part.data(), first, {rest.data(), panel_type::queries});
        }
        CHECK_FALSE(panel.weights.asks_first_keys());
        CHECK(panel.weights.at_once() == (low < 40));
        for (index q = 0; q < panel.queries; ++q) {
            const auto maximum = std::max(x[static_cast<std::size_t>(q)], x[static_cast<std::size_t>(panel.queries + q)]);
            CHECK(panel.state.maximum[q] == (waits(q) ? kernel::lowest_maximum<T> : q == 5 ? T{7} : maximum));
        }
        auto weights = x;
        if (panel.weights.at_once()) {
            panel.weights.add(panel.state, weights.data(), rows);
            panel.weights.template finish<false>();
        } else {
            panel.state.raise_maximum(x.data(), rows);
            panel.weights.choose_maxima(panel.state);
            panel.state.push_scores(weights.data(), rows);
            CHECK(panel.state.maximum[1] > kernel::lowest_maximum<T>);
        }
        CHECK(panel.weights.settle(panel.state, weights.data(), rows));
        for (index q = low == infinity ? 1 : 0; q < panel.queries; ++q) // query 0 has seen NaN
            for (index j = 0; j < rows; ++j) {
                const auto at = static_cast<std::size_t>(j * panel.queries + q);
                const auto exact = std::exp2(static_cast<double>(x[at]) - static_cast<double>(panel.state.maximum[q]));
                CHECK(std::abs(static_cast<double>(weights[at]) - exact) <= 64 * epsilon<T> * exact + 1e-37);
            }
    }
}

TEMPLATE_TEST_CASE("early_weights: what is infinite, not a number, or hidden", "[kernel][portable]", float, double) {
    using T = TestType;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    early_panel<T> panel;
    const auto scores = random_tile<T>(1);
    auto added = random_tile<T>(2);
    added[1] = -infinity;
    added[2] = nan;
    added[3] = infinity;
    const auto weights = panel.push(scores, added);
    CHECK(weights[1] == 0);
    CHECK(std::isnan(panel.state.sum[2]));
    CHECK(std::isnan(panel.state.sum[3]));
    early_panel<T> plain;
    const auto plain_weights = plain.push(scores, random_tile<T>(2));
    CHECK(same_bits(panel.state.sum[0], plain.state.sum[0]));
    CHECK(same_bits(weights[0], plain_weights[0]));
    // What is NaN stays so, and makes nobody redo the next tile.
    panel.push(scores, random_tile<T>(2));
    CHECK(panel.attempts == 1);
    CHECK(std::isnan(panel.state.sum[2]));
    CHECK_FALSE(std::isnan(panel.state.sum[1]));
}

TEMPLATE_TEST_CASE("early_weights: a key weighs 0 for queries that do not see it, whatever its score", "[kernel][portable]", float, double) {
    using T = TestType;
    using panel_type = early_panel<T>;
    if (!panel_type::weights_type::possible) return;
    constexpr auto nan = std::numeric_limits<T>::quiet_NaN();
    const auto scores = random_tile<T>(1);
    std::vector<std::uint64_t> visible(rows);
    for (index j = 0; j < rows; ++j) visible[static_cast<std::size_t>(j)] = 0x9E3779B97F4A7C15u >> j;
    const auto sees = [&](index j, index q) { return (visible[static_cast<std::size_t>(j)] >> q & 1) != 0; };
    panel_type panel, plain;
    auto hidden = scores, seen = scores;
    for (index j = 0; j < rows; ++j)
        for (index q = 0; q < panel.queries; ++q)
            if (!sees(j, q)) hidden[static_cast<std::size_t>(j * panel.queries + q)] = nan;
    panel.weights.begin(panel.state, true);
    panel.weights.add(panel.state, hidden.data(), 3, {}, visible.data());
    panel.weights.add(panel.state, hidden.data() + 3 * panel.queries, rows - 3, {}, visible.data() + 3); // ends with what was added before
    panel.weights.finish();
    CHECK(panel.weights.settle(panel.state, hidden.data(), rows));
    plain.weights.begin(plain.state, true);
    plain.weights.add(plain.state, seen.data(), rows);
    plain.weights.finish();
    for (index q = 0; q < panel.queries; ++q) {
        auto sum = T{rows}; // of the first tile
        for (index j = 0; j < rows; ++j) {
            const auto at = static_cast<std::size_t>(j * panel.queries + q);
            CHECK(same_bits(hidden[at], sees(j, q) ? seen[at] : T{0}));
            sum += hidden[at];
        }
        CHECK(same_bits(panel.state.sum[q], sum));
    }
}

} // namespace attn::testing
