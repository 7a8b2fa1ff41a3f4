// The mergeable state of a softmax, and its rules for rows that see nothing, for infinities and for NaN.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/online_softmax.hpp>

namespace attn::testing {

namespace {

/// A state with memory of its own. Scores are [rows][queries].
template <Scalar T>
struct softmax_state {
    using state_type = kernel::online_softmax<T, simd::native>;
    static constexpr index lane_count = state_type::lanes::size;

    workspace memory;
    state_type state;

    explicit softmax_state(index registers) {
        attn::detail::scratch sizes;
        state_type::take(sizes, registers, lane_count);
        memory.reserve(sizes.used_bytes());
        attn::detail::scratch scratch(memory.bytes().data());
        state = state_type::take(scratch, registers, lane_count);
        state.reset(registers);
    }
    /// Returns the weights.
    std::vector<T> push(std::vector<T> scores) {
        const auto rows = std::ssize(scores) / (state.registers * lane_count);
        state.raise_maximum(scores.data(), rows);
        state.push_scores(scores.data(), rows);
        return scores;
    }
    softmax_state& finish(T sink = -std::numeric_limits<T>::infinity()) {
        state.finish(sink);
        return *this;
    }
    double log_sum_exp(index q) const { return static_cast<double>(state.log_sum_exp(q)); }
    double scale(index q) const { return static_cast<double>(state.factor[q]); }
};

template <Scalar T>
std::vector<T> random_scores(index count, unsigned seed) {
    const auto numbers = random_tensor<T>({.tokens = 1, .channels = count}, seed, T{20});
    return {numbers.data(), numbers.data() + count};
}

} // namespace

TEMPLATE_TEST_CASE("online_softmax: pushed in pieces or at once, it is the softmax", "[kernel][portable]", float, double) {
    using T = TestType;
    for (const index registers : {1, 2, 3}) {
        softmax_state<T> whole(registers), pieces(registers);
        const auto queries = registers * softmax_state<T>::lane_count;
        constexpr index rows = 23;
        const auto scores = random_scores<T>(rows * queries, 5);
        const auto weights = whole.push(scores);
        for (const auto& [from, to] : {std::pair<index, index>{0, 1}, {1, 1}, {1, 9}, {9, rows}})
            pieces.push({scores.begin() + from * queries, scores.begin() + to * queries});
        whole.finish();
        pieces.finish();
        for (index q = 0; q < queries; ++q) {
            double sum = 0, top = -1e300;
            for (index j = 0; j < rows; ++j) top = std::max(top, static_cast<double>(scores[static_cast<std::size_t>(j * queries + q)]));
            for (index j = 0; j < rows; ++j) {
                const auto exact = std::exp(static_cast<double>(scores[static_cast<std::size_t>(j * queries + q)]) - top);
                sum += exact;
                CHECK(std::abs(static_cast<double>(weights[static_cast<std::size_t>(j * queries + q)]) - exact) <= 32 * epsilon<T>);
            }
            const auto exact = top + std::log(sum);
            CHECK(std::abs(whole.log_sum_exp(q) - exact) <= 32 * epsilon<T>);
            CHECK(std::abs(pieces.log_sum_exp(q) - exact) <= 32 * epsilon<T>);
            CHECK(std::abs(whole.scale(q) * sum - 1) <= 32 * epsilon<T>);
        }
    }
}

TEMPLATE_TEST_CASE("online_softmax: a push tells how far earlier sums shrink", "[kernel][portable]", float, double) {
    using T = TestType;
    softmax_state<T> softmax(1);
    softmax.push(std::vector<T>(softmax_state<T>::lane_count, 3));
    softmax.push(std::vector<T>(softmax_state<T>::lane_count, 5));
    const auto close = [](double value) { return Approx(value).epsilon(8 * epsilon<T>); };
    CHECK(static_cast<double>(softmax.state.factor[0]) == close(std::exp(-2)));
    softmax.push(std::vector<T>(softmax_state<T>::lane_count, 1));
    CHECK(softmax.state.factor[0] == 1);
    CHECK(static_cast<double>(softmax.state.sum[0]) == close(1 + std::exp(-2) + std::exp(-4)));
}

TEMPLATE_TEST_CASE("online_softmax: rows that a register does not see weigh nothing, whatever lies there", "[kernel][portable]", float, double) {
    using T = TestType;
    constexpr auto lane_count = softmax_state<T>::lane_count;
    softmax_state<T> softmax(3);
    constexpr index rows = 5;
    const auto queries = 3 * lane_count;
    std::vector<T> scores(static_cast<std::size_t>(rows * queries), std::numeric_limits<T>::quiet_NaN());
    const std::array<kernel::row_range, 3> seen{{{0, 2}, {3, 5}, {0, 0}}};
    const auto sees = [&](index q, index j) {
        const auto& range = seen[static_cast<std::size_t>(q / lane_count)];
        return range.first <= j && j < range.last;
    };
    for (index q = 0; q < queries; ++q)
        for (index j = 0; j < rows; ++j)
            if (sees(q, j)) scores[static_cast<std::size_t>(j * queries + q)] = 1;
    std::fill_n(softmax.state.next_maximum, 2 * lane_count, T{1});
    softmax.state.push_seen_scores(scores.data(), rows, seen.data());
    for (index q = 0; q < queries; ++q) {
        for (index j = 0; j < rows; ++j) CHECK(scores[static_cast<std::size_t>(j * queries + q)] == T(sees(q, j)));
        CHECK(softmax.state.sum[q] == T(q < 2 * lane_count ? 2 : 0));
    }
}

TEMPLATE_TEST_CASE("online_softmax: hidden scores, infinities and NaN", "[kernel][portable]", float, double) {
    using T = TestType;
    constexpr auto lane_count = softmax_state<T>::lane_count;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    const auto pushed = [](std::initializer_list<T> column) { // the same scores in all lanes but the last, which sees a 0 only
        softmax_state<T> softmax(1);
        std::vector<T> scores;
        for (const T x : column) {
            scores.insert(scores.end(), static_cast<std::size_t>(lane_count - 1), x);
            scores.push_back(scores.size() < static_cast<std::size_t>(lane_count) ? T{0} : kernel::hidden_score<T>);
        }
        softmax.push(std::move(scores));
        softmax.finish();
        return std::array{softmax.log_sum_exp(0), softmax.scale(0), softmax.log_sum_exp(lane_count - 1)};
    };
    const auto nothing = std::array{-std::numeric_limits<double>::infinity(), 0.0, 0.0};
    CHECK(pushed({kernel::hidden_score<T>}) == nothing);
    CHECK(pushed({-infinity, kernel::hidden_score<T>}) == nothing);
    CHECK(pushed({-infinity, 0, kernel::hidden_score<T>}) == std::array{0.0, 1.0, 0.0});
    CHECK(pushed({static_cast<T>(-1e30), -infinity})[0] == static_cast<double>(static_cast<T>(-1e30)));
    CHECK(pushed({std::numeric_limits<T>::lowest(), -infinity})[1] == 1);
    for (const auto& column : {pushed({0, nan}), pushed({nan, 0}), pushed({nan}), pushed({0, infinity, 1})}) {
        CHECK(std::isnan(column[0]));
        CHECK(std::isnan(column[1]));
        CHECK(column[2] == 0);
    }
}

TEMPLATE_TEST_CASE("online_softmax: sinks", "[kernel][portable]", float, double) {
    using T = TestType;
    const auto close = [](double value) { return Approx(value).epsilon(8 * epsilon<T>); };
    const auto with_sink = [](double sink) { // two scores of 0: the denominator is 2 and the sink
        softmax_state<T> softmax(1);
        softmax.push(std::vector<T>(2 * softmax_state<T>::lane_count, 0));
        return std::array{softmax.finish(static_cast<T>(sink)).log_sum_exp(0), softmax.scale(0)};
    };
    CHECK(with_sink(std::numbers::ln2)[0] == close(std::log(4)));
    CHECK(with_sink(std::numbers::ln2)[1] == close(0.25));
    CHECK(with_sink(2000)[0] == close(2000));
    CHECK(with_sink(2000)[1] == 0);
    CHECK(with_sink(-2000)[0] == close(std::numbers::ln2));
    CHECK(with_sink(-2000)[1] == 0.5);
    for (const double sink : {3.0, -1e4}) {
        softmax_state<T> empty(1);
        CHECK(empty.finish(static_cast<T>(sink)).log_sum_exp(0) == close(sink));
        CHECK(empty.scale(0) == 0);
    }
}

TEMPLATE_TEST_CASE("online_softmax: what is pushed after an earlier set of keys joins it", "[kernel][portable]", float, double) {
    using T = TestType;
    constexpr auto nothing = -std::numeric_limits<double>::infinity();
    // (m, l) of the earlier keys and of the later ones: l e^m each.
    struct sums {
        double maximum, sum;
    };
    for (const auto& [earlier, score] : {std::pair{sums{3, 2}, 4.0},
                                         {sums{9, 1}, 4.0},
                                         {sums{-4, 3}, 800.0},
                                         {sums{0, 0}, 4.0},
                                         {sums{5, 2}, nothing},
                                         {sums{0, 0}, nothing}}) {
        INFO("earlier " << earlier.sum << " * e^" << earlier.maximum << ", then a score of " << score);
        softmax_state<T> softmax(1);
        softmax.push(std::vector<T>(softmax_state<T>::lane_count, static_cast<T>(score)));
        std::vector<T> maximum(softmax_state<T>::lane_count,
                               earlier.sum == 0 ? kernel::lowest_maximum<T> : static_cast<T>(earlier.maximum)),
            sum(softmax_state<T>::lane_count, static_cast<T>(earlier.sum));
        softmax.state.finish_after(maximum.data(), sum.data());
        const auto top = std::max(earlier.sum == 0 ? nothing : earlier.maximum, score);
        const auto total = top == nothing ? 1 : earlier.sum * std::exp(earlier.maximum - top) + std::exp(score - top);
        const auto close = [](double value) { return Approx(value).epsilon(8 * epsilon<T>).margin(1e-37); };
        // Keys of which none is seen leave a row as it is, also one of zeros.
        CHECK(static_cast<double>(sum[0]) == close(score == nothing ? 1 : earlier.sum * std::exp(earlier.maximum - top) / total));
        CHECK(softmax.scale(0) == close(top == nothing ? 0 : std::exp(score - top) / total));
        if (top == nothing)
            CHECK(softmax.log_sum_exp(0) == nothing);
        else
            CHECK(softmax.log_sum_exp(0) == close(top + std::log(total)));
    }
}

TEMPLATE_TEST_CASE("merge_weights: sums, rows that saw nothing, NaN", "[kernel][portable]", float, double) {
    using T = TestType;
    using weights = kernel::merge_weights<T>;
    constexpr auto infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    const weights same(T{1}, T{1});
    CHECK(same.a == T(0.5));
    CHECK(same.b == T(0.5));
    CHECK(static_cast<double>(same.log_sum_exp) == Approx(1 + std::numbers::ln2).epsilon(4 * epsilon<T>));
    const weights three(static_cast<T>(std::log(3)), T{0});
    CHECK(static_cast<double>(three.a) == Approx(0.75).epsilon(4 * epsilon<T>));
    CHECK(static_cast<double>(three.b) == Approx(0.25).epsilon(4 * epsilon<T>));
    const weights far(T{1e4}, T{-1e4});
    CHECK((far.a == 1 && far.b == 0 && far.log_sum_exp == T{1e4}));
    const weights neither(-infinity, -infinity), first(T{2}, -infinity), second(-infinity, T{2});
    CHECK((neither.a == 0 && neither.b == 0 && neither.log_sum_exp == -infinity));
    CHECK((first.a == 1 && first.b == 0 && first.log_sum_exp == 2));
    CHECK((second.a == 0 && second.b == 1 && second.log_sum_exp == 2));
    for (const auto& w : {weights(nan, T{0}), weights(T{0}, nan), weights(nan, -infinity), weights(-infinity, nan), weights(nan, nan)})
        CHECK((std::isnan(w.a) && std::isnan(w.b) && std::isnan(w.log_sum_exp)));
}

} // namespace attn::testing
