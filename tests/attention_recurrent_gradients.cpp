// The gradient of recurrent attention: every rule against its definition, the definition against finite differences, and what is refused.
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "recurrent_gradient_checks.hpp"

namespace attn::testing {

namespace {

const std::vector<recurrent_sizes> gradient_sizes{{1, 1, 1, 1, 1, 1},
                                              {.heads = 2, .kv_heads = 2, .tokens = 100, .key_dim = 20, .value_dim = 33},
                                              {.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 37, .key_dim = 16, .value_dim = 24, .one_batch = true},
                                              {.heads = 3, .kv_heads = 1, .tokens = 19, .key_dim = 7, .value_dim = 5},
                                              {.batch = 2, .heads = 2, .kv_heads = 2, .tokens = 17, .key_dim = 2, .value_dim = 3, .one_batch = true, .one_head = true},
                                              {.tokens = 1040, .key_dim = 3, .value_dim = 2}, // two segments
                                              {.heads = 2, .kv_heads = 1, .tokens = 15, .key_dim = 3, .value_dim = 0},
                                              {.heads = 2, .kv_heads = 1, .tokens = 0, .key_dim = 3, .value_dim = 4}};

} // namespace

TEMPLATE_TEST_CASE("recurrent_attention: every gradient is its definition", "[recurrent][gradients][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule(gradient_sizes, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const given_to_recurrent<T> given(s);
        const auto wide = widened_tokens(tokens);
        given_to_recurrent<double> wide_given(s);
        wide_given.values = widened_tokens(given.values), wide_given.last = widened_tokens(given.last);
        for (const bool with_last : {false, true}) check_near_definition(recurrent_gradients_by_kernel(tokens, kind, given, with_last), recurrent_gradients_by_definition(wide, kind, wide_given, with_last));
    });
}

// Of what has decayed to nothing nothing comes back; no difference of large numbers stands for a small one.
TEMPLATE_TEST_CASE("recurrent_attention: gradients of log decays of any size", "[recurrent][gradients][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const double logs[] = {0, 0, -1e4, -0.5, -9, -std::numeric_limits<double>::infinity(), -1e-9, -50, -80, -3};
    for_each_rule({{.batch = 2, .heads = 2, .kv_heads = 1, .tokens = 53, .key_dim = 20, .value_dim = 19}}, [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        recurrent_tokens<T> tokens(s);
        for (index_t e = 0; e < tokens.log_decay.shape().size(); ++e) tokens.log_decay.data()[e] = static_cast<T>(logs[static_cast<std::size_t>(e * 7 / 3) % 10]);
        const given_to_recurrent<T> given(s);
        given_to_recurrent<double> wide_given(s);
        wide_given.values = widened_tokens(given.values), wide_given.last = widened_tokens(given.last);
        const auto ours = recurrent_gradients_by_kernel(tokens, kind, given, true);
        const auto exact = recurrent_gradients_by_definition(widened_tokens(tokens), kind, wide_given, true);
        check_near_definition(ours, exact);
        for (index_t e = 0; e < ours.all[3].shape().size(); ++e) { // each beside its decay
            const double slope = static_cast<double>(ours.all[3].data()[e]), expected = exact.all[3].data()[e];
            const auto decay = std::exp(static_cast<double>(tokens.log_decay.data()[e]));
            CHECK(std::abs(slope - expected) <= 100 * epsilon<T> * decay + static_cast<double>(std::numeric_limits<T>::min()));
        }
    });
}

// A loss of all results and of the last state, each number of what it reads moved a little.
TEST_CASE("recurrent_attention: the definition's gradient is the slope of the definition", "[recurrent][gradients]") {
    for_each_rule({{.batch = 2, .heads = 2, .kv_heads = 1, .tokens = 5, .key_dim = 3, .value_dim = 2, .one_batch = true}},
                  [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        recurrent_tokens<double> tokens(s);
        const given_to_recurrent<double> given(s);
        const auto gradients = recurrent_gradients_by_definition(tokens, kind, given, true);
        const auto loss = [&] {
            const auto answer = reference_of(tokens, kind, true);
            double sum = 0;
            for (index_t e = 0; e < answer.values.shape().size(); ++e) sum += answer.values.data()[e] * given.values.data()[e];
            for (index_t e = 0; e < answer.last.shape().size(); ++e) sum += answer.last.data()[e] * given.last.data()[e];
            return sum;
        };
        tensor<double>* const parameters[] = {&tokens.queries, &tokens.keys, &tokens.values, &tokens.log_decay, &tokens.beta, &tokens.a, &tokens.b, &tokens.first_state};
        for (std::size_t n = 0; n < 8; ++n)
            for (index_t e = 0; e < gradients.all[n].shape().size(); ++e) {
                constexpr double step = 1e-6;
                auto& x = parameters[n]->data()[e];
                const auto before = x;
                x = before + step;
                const auto above = loss();
                x = before - step;
                const auto slope = (above - loss()) / (2 * step);
                x = before;
                CAPTURE(n, e);
                CHECK(std::abs(gradients.all[n].data()[e] - slope) <= 1e-7 * std::max(1.0, std::abs(slope)));
            }
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: gradients have the same bits on every executor, and whatever is wanted", "[recurrent][gradients][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 40, .key_dim = 9, .value_dim = 18, .one_batch = true}},
                  [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const given_to_recurrent<T> given(s);
        const auto whole = recurrent_gradients_by_kernel(tokens, kind, given, true);
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            CHECK(same_bits(recurrent_gradients_by_kernel(tokens, kind, given, true, executor), whole));
        });
        for (std::size_t n = 0; n < whole.all.size(); ++n) {
            if (!whole.all[n].data()) continue;
            recurrent_gradient_answer<T> one(tokens, kind);
            for (std::size_t other = 0; other < one.all.size(); ++other)
                if (other != n) one.all[other] = {};
            auto wanted = one.wanted();
            wanted.d_last_state = given.last;
            tokens.with_rule(kind, {}, [&](auto op) {
                op.first_state = tokens.first_state;
                backward(op, tokens.in(), saved_outputs<T>{given.values}, output_gradients<T>{given.values}, wanted);
            });
            CHECK(same_bits(one.all[n], whole.all[n]));
        }
    });
}

TEST_CASE("recurrent_attention: what is refused of a gradient", "[recurrent][gradients][errors]") {
    const recurrent_sizes s{.heads = 2, .kv_heads = 2, .tokens = 6, .key_dim = 4, .value_dim = 3};
    const recurrent_tokens<float> tokens(s);
    const given_to_recurrent<float> given(s);
    const auto error = [&](recurrent_rule kind, const auto& change) {
        recurrent_gradients<float> wanted;
        change(wanted);
        return error_of([&] {
            tokens.with_rule(kind, {}, [&](const auto& op) {
                backward(op, tokens.in(), saved_outputs<float>{given.values}, output_gradients<float>{given.values}, wanted);
            });
        });
    };
    tensor<float> of_term({1, 2, 6, 1}), of_state(s.state()), wrong({1, 2, 5, 1});
    CHECK(error(recurrent_rule::linear, [&](auto& w) { w.log_decay = of_term; }) == "recurrent_attention: wanted.log_decay is asked for, but the operator has none");
    CHECK(error(recurrent_rule::gated, [&](auto& w) { w.beta = of_term; }) == "recurrent_attention: wanted.beta is asked for, but the operator has none");
    CHECK(error(recurrent_rule::delta, [&](auto& w) { w.a = of_term; }) == "recurrent_attention: wanted.a is asked for, but the operator has none");
    CHECK(error(recurrent_rule::gated, [&](auto& w) { w.log_decay = wrong; }) == "recurrent_attention: wanted.log_decay has shape (1, 2, 5, 1), but (1, 2, 6, 1) is needed");
    CHECK(error(recurrent_rule::gated, [&](auto& w) { w.first_state = wrong; }) == "recurrent_attention: wanted.first_state has shape (1, 2, 5, 1), but (1, 2, 4, 3) is needed");
    CHECK(error(recurrent_rule::gated, [&](auto& w) { w.d_last_state = wrong; }) ==
          "recurrent_attention: wanted.d_last_state has shape (1, 2, 5, 1), but (1, 2, 4, 3) is needed");
    check_says(error(recurrent_rule::gated, [&](auto& w) { w.first_state = of_state, w.d_last_state = of_state; }), {"recurrent_attention", "overlaps wanted.d_last_state"});
    check_says(error(recurrent_rule::gated, [&](auto& w) { w.log_decay = tensor_view<float>(const_cast<float*>(tokens.log_decay.data()), tokens.log_decay.shape(), of_term.view().strides()); }),
               {"recurrent_attention: wanted.log_decay", "overlaps rule.log_decay"});
}

} // namespace attn::testing
