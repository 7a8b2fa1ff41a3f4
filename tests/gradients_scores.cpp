// The gradients of score functions' parameters, against finite differences by the parameters.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/talking_heads.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/forgetting.hpp>
#include <attn/score/kerple.hpp>
#include <attn/score/relative_buckets.hpp>
#include <attn/score/soft_cap.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

using numbers = std::vector<double>;

/// One of a user's own: score - slope (i - j)^2 / 8, and its parameter's gradient, as ScoreFunction says.
struct squared_distance {
    double slope;

    template <class S>
    S operator()(S score, auto query, auto key) const {
        const S distance = static_cast<S>(query - key);
        return score - static_cast<S>(slope / 8) * distance * distance;
    }
    template <class S>
    S parameter_slope(index_t, S, auto query, auto key) const {
        const S distance = static_cast<S>(query - key);
        return S(-0.125) * distance * distance;
    }
    template <Scalar T>
    struct gradients {
        tensor_view<T> slope = {};
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.score.slope", wanted.slope, shape{1, 1, 1, 1});
    }
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        sums.of_number(0, wanted.slope);
    }
};

/// A call in double, and a loss that is linear in what it writes.
struct scored_call {
    problem p;
    given<double> in;
    answer<double> loss;

    explicit scored_call(const problem& sizes) : p(sizes), in(random_given<double>(p)) {
        const shape s{p.batch, p.heads, p.queries, p.value_dim};
        loss = no_answer<double>(s, true);
        loss.values = random_tensor<double>(s, 7);
        loss.log_sum_exp = random_tensor<double>(loss.log_sum_exp.shape(), 8);
    }
    /// By the definition.
    double value(const auto& op) const {
        auto out = no_answer<double>(loss.values.shape(), true);
        if constexpr (requires { op.logits_mix; })
            reference::talking_heads<double>(in, out.out(), op.logits_mix, op.logits_bias, op.weights_mix, op.weights_bias, op.scale, op.score, op.pattern, op.sinks);
        else reference::softmax<double>(in, out.out(), op.scale, op.score, op.pattern, op.sinks);
        double sum = 0;
        for (index_t e = 0; e < out.values.shape().size(); ++e) sum += out.values.data()[e] * loss.values.data()[e];
        for (index_t e = 0; e < out.log_sum_exp.shape().size(); ++e)
            if (std::isfinite(out.log_sum_exp.data()[e])) sum += out.log_sum_exp.data()[e] * loss.log_sum_exp.data()[e];
        return sum;
    }
    /// Of all parameters, in order.
    template <class Op>
    numbers gradient(const Op& op, auto& executor) const {
        auto saved = no_answer<double>(loss.values.shape(), true);
        attend(op, inputs<double>(in), saved.out());
        typename Op::template gradients<double> wanted;
        std::vector<tensor<double>> all;
        all.reserve(32);
        detail::check_score_gradients(op.score, wanted.score, [&](const char*, const tensor_view<double>& view, const shape& s) {
            all.emplace_back(s);
            std::fill_n(all.back().data(), s.size(), guard<double>);
            const_cast<tensor_view<double>&>(view) = all.back();
        });
        backward(op, inputs<double>(in), {saved.values, saved.log_sum_exp}, {loss.values, loss.log_sum_exp}, wanted, executor);
        numbers flat;
        for (const auto& t : all) flat.insert(flat.end(), t.data(), t.data() + t.shape().size());
        return flat;
    }
};

/// with(numbers, use) calls use(op) with an operator whose parameters are these numbers.
void check_parameters(const problem& p, const numbers& parameters, const auto& with) {
    INFO(describe(p));
    const scored_call call(p);
    numbers ours;
    with(parameters, [&](const auto& op) {
        sequential here;
        ours = call.gradient(op, here);
    });
    REQUIRE(ours.size() == parameters.size());
    std::mt19937 random(5);
    for (int direction = 0; direction < 3; ++direction) { // all parameters at once, each by one step up or down
        numbers along(parameters.size());
        for (auto& x : along) x = random() >> 31 ? 1 : -1;
        const auto loss = [&](double step) {
            auto moved = parameters;
            for (std::size_t e = 0; e < moved.size(); ++e) moved[e] += step * along[e];
            double value = 0;
            with(moved, [&](const auto& op) { value = call.value(op); });
            return value;
        };
        constexpr double step = 1e-4; // the error is of the fourth power of it
        const auto slope = (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step);
        double expected = 0;
        for (std::size_t e = 0; e < ours.size(); ++e) expected += ours[e] * along[e];
        CHECK(std::abs(slope - expected) <= 1e-8 * (1 + std::abs(loss(0)) + std::abs(slope)));
    }
    with(parameters, [&](const auto& op) {
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO("on " << name);
            CHECK(std::ranges::equal(call.gradient(op, executor), ours, [](double a, double b) { return same_bits(a, b); }));
        });
    });
}

/// Another stride in each batch entry.
struct strided_entries {
    strided at(index_t batch, index_t) const { return strided{batch + 2}; }
};

const std::vector<index_t> own_places{3, -2};
const std::vector<problem> score_problems{{2, 4, 2, 21, 33, 5, 6}, {1, 4, 4, 270, 260, 3, 3}, {2, 4, 1, 9, 7, 3, 2, {.first_query = own_places, .first_key = own_places}}};

numbers random_numbers(index_t count, double low, double high, unsigned seed = 3) {
    const auto t = random_tensor<double>({1, 1, 1, count}, seed, 0.5);
    numbers all(t.data(), t.data() + count);
    for (auto& x : all) x = low + (high - low) * (x + 0.5);
    return all;
}
std::span<const double> part(const numbers& all, index_t first, index_t count) {
    return std::span(all).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}
tensor_view<const double> table(const numbers& all, index_t first, const shape& s) { return head_major(all.data() + first, s); }

template <class S, Pattern P = dense>
softmax_attention<P, S> attention_of(const S& score, const P& pattern = {}) {
    return {.score = score, .pattern = pattern};
}

} // namespace

TEST_CASE("score gradients: numbers for each head, or for all", "[attention][portable][arithmetic]") {
    for (const auto& p : score_problems) {
        check_parameters(p, random_numbers(4, 0.1, 0.6), [](const numbers& x, const auto& use) { use(attention_of(alibi(x))); });
        check_parameters(p, {1.5}, [](const numbers& x, const auto& use) { use(attention_of(soft_cap{x[0]})); });
        check_parameters(p, {0.3}, [](const numbers& x, const auto& use) { use(attention_of(squared_distance{x[0]})); });
        check_parameters(p, random_numbers(8, 0.2, 1.4),
                         [](const numbers& x, const auto& use) { use(attention_of(kerple_logarithmic{part(x, 0, 4), part(x, 4, 4)})); });
        check_parameters(p, random_numbers(8, 0.2, 1.4), [](const numbers& x, const auto& use) { use(attention_of(kerple_power{part(x, 0, 4), part(x, 4, 4)})); });
    }
}

TEST_CASE("score gradients: tables of buckets", "[attention][portable][arithmetic]") {
    for (const auto& p : score_problems)
        for (const index_t heads : {1, 4})
            for (const bool both : {true, false})
                check_parameters(p, random_numbers(heads * 8, -1, 1), [&](const numbers& x, const auto& use) {
                    use(attention_of(relative_buckets(table(x, 0, {1, heads, 1, 8}), {.max_distance = 20, .bidirectional = both})));
                });
}

TEST_CASE("score gradients: gates", "[attention][portable][arithmetic]") {
    for (const auto& p : score_problems)
        for (const shape s : {shape{p.batch, p.heads, 280, 1}, shape{1, p.heads, 280, 1}, shape{1, 1, 280, 1}})
            for (const bool zeros : {false, true}) {
                auto gates = random_numbers(s.size(), -0.3, -0.01);
                if (zeros) gates[2] = gates[20] = gates[21] = -std::numeric_limits<double>::infinity();
                check_parameters(p, gates, [&](const numbers& x, const auto& use) { use(attention_of(forgetting(table(x, 0, s), -5))); });
                check_parameters(p, gates, [&](const numbers& x, const auto& use) { use(attention_of(forgetting(table(x, 0, s), -5), causal{})); });
            }
}

TEST_CASE("score gradients: in chains, with patterns and sinks", "[attention][portable][arithmetic]") {
    const problem p{2, 4, 2, 21, 33, 5, 6};
    const numbers sinks{0.1, -0.4, 0.7, 0.2};
    // cap, 4 slopes, a cap, 8 numbers of kerple, 32 of buckets, 40 gates, 21 x 33 biases, a cap, a slope
    auto parameters = random_numbers(1 + 4 + 1 + 8 + 32 + 40 + 21 * 33 + 1 + 1, 0.1, 0.7);
    parameters[0] = 2;
    parameters[5] = 3;
    parameters[86 + 21 * 33] = 4;
    for (std::size_t gate = 46; gate < 86; ++gate) parameters[gate] *= -1;
    const auto chain_of = [](const numbers& x) {
        return composed_score{soft_cap{x[0]},
                              composed_score{alibi(part(x, 1, 4)), [](auto score, auto, auto) { return score + score; }, soft_cap{x[5]}},
                              kerple_logarithmic{part(x, 6, 4), part(x, 10, 4)},
                              relative_buckets(table(x, 14, {1, 4, 1, 8}), {.max_distance = 20}),
                              forgetting(table(x, 46, {1, 1, 40, 1})),
                              additive_bias<double>{table(x, 86, {1, 1, 21, 33})},
                              soft_cap{x[86 + 21 * 33]},
                              squared_distance{x[87 + 21 * 33]}};
    };
    check_parameters(p, parameters, [&](const numbers& x, const auto& use) {
        use(softmax_attention{.scale = 0.7, .score = chain_of(x), .pattern = causal{}, .sinks = sinks});
    });
    check_parameters(p, parameters, [&](const numbers& x, const auto& use) { use(attention_of(chain_of(x), local{3} | strided{5})); });
}

TEST_CASE("score gradients: of talking heads, between two mixings", "[attention][portable][arithmetic]") {
    const auto logits_mix = random_tensor<double>({1, 1, 4, 4}, 21), weights_mix = random_tensor<double>({1, 1, 4, 4}, 22);
    const std::vector<double> logits_bias{0.3, -0.2, 0.7, 0.1}, sinks{0.1, -0.4, 0.7, 0.2};
    const auto talking = [&](const auto& score, const auto& pattern) {
        return talking_heads_attention{.logits_mix = logits_mix, .logits_bias = logits_bias, .weights_mix = weights_mix, .scale = 0.7, .score = score, .pattern = pattern, .sinks = sinks};
    };
    // a cap, 4 slopes, 8 numbers of kerple, 32 of buckets, gates, biases
    const auto chain_of = [](const numbers& x, const shape& gates, const additive_bias<double>& bias) {
        return composed_score{soft_cap{x[0]},
                              alibi(part(x, 1, 4)),
                              kerple_logarithmic{part(x, 5, 4), part(x, 9, 4)},
                              relative_buckets(table(x, 13, {1, 4, 1, 8}), {.max_distance = 20}),
                              forgetting(table(x, 45, gates), -5),
                              bias};
    };
    for (const auto& p : score_problems)
        for (const bool each : {false, true}) { // tables of each batch entry and head, or of all
            const index_t entries = each ? p.batch : 1, heads = each ? 4 : 1;
            const shape gates{entries, heads, 280, 1}, biases{entries, heads, p.queries, p.keys};
            auto parameters = random_numbers(45 + gates.size() + biases.size(), 0.1, 0.6);
            parameters[0] = 2;
            for (index_t gate = 45; gate < 45 + gates.size(); ++gate) parameters[static_cast<std::size_t>(gate)] *= -1;
            const auto with = [&](const auto& pattern) {
                check_parameters(p, parameters, [&](const numbers& x, const auto& use) {
                    use(talking(chain_of(x, gates, {table(x, 45 + gates.size(), biases), p.positions.first_query, p.positions.first_key}), pattern));
                });
            };
            with(dense{});
            with(local{3} | strided{5});
        }
}

TEST_CASE("score gradients: of talking heads, added where batch entries with other steps stand at one table", "[attention][portable][arithmetic]") {
    const problem p{2, 4, 2, 150, 300, 3, 3};
    for (const shape s : {shape{1, 1, 150, 1}, shape{1, 4, 1, 300}, shape{1, 4, 150, 300}, shape{1, 1, 1, 1}, shape{2, 4, 150, 1}})
        check_parameters(p, random_numbers(s.size(), -1, 1), [&](const numbers& x, const auto& use) {
            use(talking_heads_attention{.score = additive_bias<double>{table(x, 0, s)}, .pattern = strided_entries{}});
        });
}

TEST_CASE("score gradients: what a hidden key holds changes no bit", "[attention]") {
    const problem p{1, 4, 2, 20, 30, 5, 6};
    const auto x = random_numbers(32, 0.1, 0.6);
    const auto op = attention_of(composed_score{soft_cap{2}, alibi(part(x, 0, 4)), kerple_power{part(x, 4, 4), part(x, 8, 4)}, forgetting(table(numbers(30, -0.1), 0, {1, 1, 30, 1})),
                                                relative_buckets(table(x, 0, {1, 4, 1, 8}), {.max_distance = 20})},
                                 causal{});
    scored_call call(p);
    sequential here;
    const auto before = call.gradient(op, here);
    for (auto* t : {&call.in.keys, &call.in.values})
        for (index_t h = 0; h < 2; ++h)
            for (index_t j = 20; j < 30; ++j)
                for (index_t c = 0; c < t->shape().channels; ++c) (*t)(0, h, j, c) = guard<double>;
    CHECK(std::ranges::equal(call.gradient(op, here), before, [](double a, double b) { return same_bits(a, b); }));
}

TEST_CASE("score gradients: an infinite score has the slope of its cap", "[attention]") {
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    CHECK(soft_cap{3}.parameter_slope(0, infinity, 0, 0) == 1);
    CHECK(soft_cap{3}.parameter_slope(0, -infinity, 0, 0) == -1);
    CHECK(soft_cap{3}.parameter_slope(0, 0.0, 0, 0) == 0);
}

TEST_CASE("score gradients: calls without queries or keys give zeros", "[attention]") {
    const auto x = random_numbers(16, 0.1, 0.6);
    for (const problem& p : {problem{2, 2, 1, 0, 7, 3, 3}, problem{2, 2, 1, 7, 0, 3, 3}, problem{2, 2, 1, 0, 0, 3, 3}, problem{0, 2, 1, 5, 7, 3, 3}}) {
        const auto op = attention_of(composed_score{soft_cap{2}, alibi(part(x, 0, 2)), forgetting(table(numbers(7, -0.1), 0, {1, 1, 7, 1})),
                                                    relative_buckets(table(x, 0, {1, 2, 1, 8}), {.max_distance = 20})});
        const scored_call call(p);
        thread_pool pool(3);
        const auto ours = call.gradient(op, pool);
        CHECK(ours.size() == 1 + 2 + 7 + 16);
        CHECK(std::ranges::all_of(ours, [](double g) { return g == 0; }));
    }
}

TEST_CASE("score gradients: what does not fit is refused", "[attention]") {
    const problem p{1, 2, 2, 6, 9, 4, 3};
    const numbers x{0.1, 0.2, 0.3, 0.4};
    const kerple_power both{part(x, 0, 2), part(x, 2, 2)};
    const auto op = attention_of(composed_score{both, alibi(part(x, 0, 2)), forgetting(table(numbers(9, -0.1), 0, {1, 1, 9, 1}))});
    using op_type = std::remove_const_t<decltype(op)>;
    const scored_call call(p);
    auto saved = no_answer<double>(call.loss.values.shape(), true);
    attend(op, inputs<double>(call.in), saved.out());
    const auto error = [&](const op_type::gradients<double>& wanted) {
        return error_of([&] { backward(op, inputs<double>(call.in), {saved.values, saved.log_sum_exp}, {call.loss.values, call.loss.log_sum_exp}, wanted); });
    };
    tensor<double> right({1, 2, 1, 1}), wrong({1, 1, 1, 2});
    op_type::gradients<double> wanted;
    std::get<0>(wanted.score).r2 = wrong;
    check_says(error(wanted), {"softmax_attention", "wanted.score.r2", "(1, 1, 1, 2)", "(1, 2, 1, 1)"});
    std::get<0>(wanted.score) = {.r1 = right, .r2 = {}};
    CHECK(error(wanted) == nothing_thrown);
    std::get<1>(wanted.score).slopes = right;
    check_says(error(wanted), {"softmax_attention", "wanted.score.slopes", "overlaps wanted.score.r1"});
    std::get<1>(wanted.score).slopes = head_major(const_cast<double*>(x.data()), {1, 2, 1, 1});
    check_says(error(wanted), {"softmax_attention", "wanted.score.slopes", "overlaps"});
    std::get<1>(wanted.score).slopes = {};
    std::get<2>(wanted.score).log_gates = wrong;
    check_says(error(wanted), {"softmax_attention", "wanted.score.log_gates", "(1, 1, 1, 2)", "(1, 1, 9, 1)"});
}

} // namespace attn::testing
