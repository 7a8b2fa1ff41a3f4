// The gradients of the parameters of talking-heads attention: mixings, their biases, sinks; and what is refused.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/talking_heads_attention.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/reference/talking_heads.hpp>
#include <attn/score/soft_cap.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

static_assert(DifferentiableAttention<talking_heads_attention<>> && DifferentiableAttention<talking_heads_attention<causal>>);

/// All parameters that have a gradient, for 2 heads of queries, 3 mixed ones, 4 of the result.
struct talking_parameters {
    tensor<double> logits_mix = random_tensor<double>({1, 1, 3, 2}, 21), weights_mix = random_tensor<double>({1, 1, 4, 3}, 22);
    std::vector<double> logits_bias{0.3, -0.2, 0.7}, weights_bias{0.1, 0.2, -0.3, 0.4}, sinks{0.5, -std::numeric_limits<double>::infinity(), 1};

    template <Pattern P, ScoreFunction S>
    talking_heads_attention<P, S> op(const P& pattern, const S& score) const {
        return {.logits_mix = logits_mix, .logits_bias = logits_bias, .weights_mix = weights_mix,
                .weights_bias = weights_bias, .score = score, .pattern = pattern, .sinks = sinks};
    }
    std::vector<std::span<double>> each() {
        const auto numbers = [](tensor<double>& t) { return std::span(t.data(), static_cast<std::size_t>(t.shape().size())); };
        return {numbers(logits_mix), logits_bias, numbers(weights_mix), weights_bias, sinks};
    }
};

/// Their gradients, in the same order.
template <Scalar T>
struct talking_parameter_gradients {
    std::vector<tensor<T>> each;

    talking_parameter_gradients() {
        for (const auto& s : {shape{1, 1, 3, 2}, shape{1, 3, 1, 1}, shape{1, 1, 4, 3}, shape{1, 4, 1, 1}, shape{1, 3, 1, 1}}) each.emplace_back(s);
    }
    mixed_head_gradients<T> wanted() { return {{}, each[0], each[1], each[2], each[3], each[4]}; }
};

template <Scalar T, class P, class S = identity_score>
void check_parameters(const problem& p, const P& pattern, const S& score = {}) {
    const auto in = random_given<T>(p);
    talking_parameters parameters;
    const auto op = parameters.op(pattern, score);
    auto saved = no_answer<T>(op.output_shape(p.shapes()), op.log_sum_exp_shape(p.shapes()));
    attend(op, inputs<T>(in), saved.out());
    const auto d_out = random_tensor<T>(saved.values.shape(), 7), d_rows = random_tensor<T>(saved.log_sum_exp.shape(), 8);
    talking_parameter_gradients<T> ours;
    backward(op, inputs<T>(in), {saved.values, saved.log_sum_exp}, {d_out, d_rows}, {ours.wanted()});

    const auto wide = [](const tensor<T>& t) { return reference::widen(t.view()); };
    const auto q = wide(in.queries), k = wide(in.keys), v = wide(in.values), loss_out = wide(d_out), loss_rows = wide(d_rows);
    talking_parameter_gradients<double> defined;
    reference::talking_heads_gradients<double>({q, k, v, in.positions}, {loss_out, loss_rows}, defined.wanted(), op.logits_mix, op.logits_bias,
                                               op.weights_mix, op.weights_bias, op.scale, op.score, op.pattern, op.sinks);
    const auto loss = [&] { // of the parameters as they are
        auto result = no_answer<double>(saved.values.shape(), saved.log_sum_exp.shape());
        reference::talking_heads<double>({q, k, v, in.positions}, result.out(), op.logits_mix, op.logits_bias, op.weights_mix, op.weights_bias, op.scale,
                                         op.score, op.pattern, op.sinks);
        double sum = 0;
        for (index_t e = 0; e < loss_out.shape().size(); ++e) sum += result.values.data()[e] * loss_out.data()[e];
        for (index_t e = 0; e < loss_rows.shape().size(); ++e)
            if (std::isfinite(result.log_sum_exp.data()[e])) sum += result.log_sum_exp.data()[e] * loss_rows.data()[e];
        return sum;
    };
    const auto all = parameters.each();
    for (std::size_t g = 0; g < all.size(); ++g)
        for (std::size_t e = 0; e < all[g].size(); ++e) {
            INFO("parameter " << g << ", number " << e);
            double& number = all[g][e];
            const auto kept = number;
            constexpr double step = 1e-4;
            const auto moved = [&](double by) {
                number = kept + by;
                return loss();
            };
            const auto slope = (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step);
            number = kept;
            const auto exact = defined.each[g].data()[e];
            CHECK(std::abs(exact - slope) <= 1e-8 * (1 + std::abs(loss()) + std::abs(slope)));
            const auto rows = std::sqrt(static_cast<double>(p.batch * p.queries));
            CHECK(std::abs(static_cast<double>(ours.each[g].data()[e]) - exact) <= 200 * epsilon<T> * (1 + std::abs(exact)) * rows);
        }
}

/// A call and its gradients, of which everything is right, for tests to spoil one thing of.
struct good_talk {
    talking_parameters parameters;
    talking_parameter_gradients<float> gradients;
    tensor<float> q = random_tensor<float>({2, 2, 9, 8}, 1), k = random_tensor<float>({2, 1, 11, 8}, 2), v = random_tensor<float>({2, 2, 11, 5}, 3);
    tensor<float> out{shape{2, 4, 9, 5}}, log_sum_exp{shape{2, 3, 9, 1}}, d_out = random_tensor<float>({2, 4, 9, 5}, 4),
                                                                   d_rows = random_tensor<float>({2, 3, 9, 1}, 5);
    talking_heads_attention<> op = parameters.op(dense{}, identity_score{});
    saved_outputs<float> saved{out, log_sum_exp};
    output_gradients<float> given{d_out, d_rows};
    mixed_head_gradients<float> wanted = gradients.wanted();

    std::string refusal() const {
        return error_of([&] { backward(op, inputs<float>{q, k, v}, saved, given, {wanted}); });
    }
};

} // namespace

TEMPLATE_TEST_CASE("talking heads gradient: mixings, biases and sinks are what finite differences say", "[attention][portable]", ATTN_TEST_NUMBERS) {
    const problem p{2, 2, 1, 7, 11, 4, 3};
    check_parameters<TestType>(p, dense{});
    check_parameters<TestType>({2, 2, 2, 21, 70, 4, 3, {.first_query = 60, .first_key = 3}}, causal{}, soft_cap{2});
    check_parameters<TestType>({1, 2, 1, 9, 12, 4, 3, {.first_key = 4}}, causal{}); // some rows see nothing but their sinks
    check_parameters<TestType>({1, 2, 1, 19, 23, 4, 3}, strided{3});
}

TEST_CASE("talking heads gradient: no queries, no keys, no batch entries give 0", "[attention][portable]") {
    for (const auto& p : std::vector<problem>{{1, 2, 1, 0, 5, 4, 3}, {1, 2, 1, 5, 0, 4, 3}, {0, 2, 1, 5, 5, 4, 3}}) {
        INFO(describe(p));
        const auto in = random_given<float>(p);
        talking_parameters parameters;
        parameters.sinks.clear();
        const auto op = parameters.op(dense{}, identity_score{});
        auto saved = no_answer<float>(op.output_shape(p.shapes()), op.log_sum_exp_shape(p.shapes()));
        attend(op, inputs<float>(in), saved.out());
        const auto d_out = random_tensor<float>(saved.values.shape(), 7);
        talking_parameter_gradients<float> ours;
        auto wanted = ours.wanted();
        wanted.sinks = {};
        tensor<float> dq(p.shapes().queries), dk(p.shapes().keys), dv(p.shapes().values);
        wanted.queries = dq, wanted.keys = dk, wanted.values = dv;
        for (auto* t : {&dq, &dk, &dv, &ours.each[0], &ours.each[1], &ours.each[2], &ours.each[3]}) std::fill_n(t->data(), t->shape().size(), guard<float>);
        backward(op, inputs<float>(in), {saved.values, saved.log_sum_exp}, {d_out}, {wanted});
        for (const auto* t : {&dq, &dk, &dv, &ours.each[0], &ours.each[1], &ours.each[2], &ours.each[3]})
            CHECK(std::all_of(t->data(), t->data() + t->shape().size(), [](float x) { return x == 0; }));
    }
}

TEST_CASE("talking heads gradient: what is wrong is refused, by name", "[attention][portable]") {
    CHECK(good_talk().refusal() == nothing_thrown);
    const auto refused = [](auto spoil, const std::vector<std::string>& parts) {
        good_talk call;
        spoil(call);
        check_says(call.refusal(), parts);
    };
    tensor<float> small({1, 1, 2, 2});
    refused([&](auto& c) { c.wanted.logits_mix = small; }, {"talking_heads_attention", "wanted.logits_mix", "(1, 1, 2, 2)", "(1, 1, 3, 2)"});
    refused([&](auto& c) { c.wanted.logits_bias = small; }, {"wanted.logits_bias", "(1, 1, 2, 2)", "(1, 3, 1, 1)"});
    refused([&](auto& c) { c.wanted.weights_mix = small; }, {"wanted.weights_mix", "(1, 1, 2, 2)", "(1, 1, 4, 3)"});
    refused([&](auto& c) { c.wanted.weights_bias = small; }, {"wanted.weights_bias", "(1, 1, 2, 2)", "(1, 4, 1, 1)"});
    refused([&](auto& c) { c.wanted.sinks = small; }, {"wanted.sinks", "(1, 1, 2, 2)", "(1, 3, 1, 1)"});
    const auto mix = random_tensor<double>({1, 1, 4, 2}, 6);
    const tensor<float> rows({2, 2, 9, 1});
    const auto only_weights = [&](auto& c) {
        c.op = {.weights_mix = mix};
        c.saved.log_sum_exp = rows;
        c.given.log_sum_exp = {};
    };
    refused(only_weights, {"wanted.logits_mix", "there is no logits_mix"});
    refused([](auto& c) { c.op.logits_bias = {}; }, {"wanted.logits_bias", "there is no logits_bias"});
    refused([](auto& c) { c.op.weights_bias = {}; }, {"wanted.weights_bias", "there is no weights_bias"});
    refused([](auto& c) { c.op.sinks = {}; }, {"wanted.sinks", "there are no sinks"});
    refused([](auto& c) { c.wanted.sinks = c.wanted.logits_bias; }, {"wanted.sinks", "overlaps wanted.logits_bias"});
    refused([](auto& c) { c.wanted.logits_mix = head_major(c.d_out.data(), {1, 1, 3, 2}); }, {"wanted.logits_mix", "overlaps"});
    refused([](auto& c) { c.saved.log_sum_exp = c.out; }, {"saved.log_sum_exp", "(2, 4, 9, 5)", "(2, 3, 9, 1)"});
}

} // namespace attn::testing
