// The front door of gradients: the forms of a call, what is refused, and the gradients of parameters.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

static_assert(DifferentiableAttention<softmax_attention<>> && DifferentiableAttention<softmax_attention<causal>>);

/// A call and its gradients, of which everything is right, for tests to spoil one thing of.
struct good_backward {
    shape q_shape{2, 4, 9, 8}, k_shape{2, 2, 11, 8}, v_shape{2, 2, 11, 5}, out_shape{2, 4, 9, 5}, row_shape{2, 4, 9, 1};
    tensor<float> q = random_tensor<float>(q_shape, 1), k = random_tensor<float>(k_shape, 2), v = random_tensor<float>(v_shape, 3);
    tensor<float> out{out_shape}, log_sum_exp{row_shape}, d_out = random_tensor<float>(out_shape, 4), d_rows = random_tensor<float>(row_shape, 5);
    tensor<float> dq{q_shape}, dk{k_shape}, dv{v_shape}, d_sinks{shape{1, 4, 1, 1}};
    saved_outputs<float> saved{out, log_sum_exp};
    output_gradients<float> given{d_out, d_rows};
    softmax_attention<>::gradients<float> wanted{{dq, dk, dv}};

    inputs<float> in() const { return {q, k, v}; }
    template <class Op = softmax_attention<>>
    std::string refusal(const Op& op = {}) const {
        return error_of([&] { backward(op, in(), saved, given, wanted); });
    }
};

} // namespace

TEST_CASE("backward: its calls give the same", "[attention][portable]") {
    good_backward call;
    const softmax_attention<> op;
    attend(op, call.in(), outputs<float>{call.out, call.log_sum_exp});
    backward(op, call.in(), call.saved, call.given, call.wanted);

    tensor<float> dq(call.q_shape), dk(call.k_shape), dv(call.v_shape);
    thread_pool pool(2);
    backward(op, call.in(), call.saved, call.given, {{dq, dk, dv}}, pool);
    CHECK((same_bits(dq, call.dq) && same_bits(dk, call.dk) && same_bits(dv, call.dv)));

    workspace memory(backward_workspace_bytes<float>(op, shapes_of(call.in()), pool));
    std::fill_n(dq.data(), dq.shape().size(), guard<float>);
    backward(op, call.in(), call.saved, call.given, {{dq}}, execution(pool, memory));
    CHECK(same_bits(dq, call.dq));
}

TEST_CASE("backward: without a gradient of log_sum_exp it is 0", "[attention]") {
    good_backward call;
    const softmax_attention<> op;
    attend(op, call.in(), outputs<float>{call.out, call.log_sum_exp});
    std::fill_n(call.d_rows.data(), call.row_shape.size(), 0.0f);
    backward(op, call.in(), call.saved, call.given, call.wanted);
    tensor<float> dk(call.k_shape);
    backward(op, call.in(), call.saved, {call.d_out}, {{.keys = dk}});
    CHECK(same_bits(dk, call.dk));
}

TEST_CASE("backward: what is wrong is refused, by name", "[attention][portable]") {
    const good_backward good;
    CHECK(good.refusal() == nothing_thrown);

    const auto refused = [](auto spoil, const std::vector<std::string>& parts) {
        good_backward call;
        spoil(call);
        check_says(call.refusal(), parts);
    };
    tensor<float> small({1, 1, 3, 2});
    refused([](auto& c) { c.saved.values = c.d_rows; }, {"softmax_attention", "saved.values", "(2, 4, 9, 1)", "(2, 4, 9, 5)"});
    refused([](auto& c) { c.saved.log_sum_exp = {}; }, {"saved.log_sum_exp", "(2, 4, 9, 1)"});
    refused([&](auto& c) { c.given.values = small; }, {"d_out.values", "(1, 1, 3, 2)", "(2, 4, 9, 5)"});
    refused([&](auto& c) { c.given.log_sum_exp = small; }, {"d_out.log_sum_exp", "(1, 1, 3, 2)"});
    refused([&](auto& c) { c.given.log_sum_exp = head_major<const float>(nullptr, {1, 1, 3, 1}); }, {"d_out.log_sum_exp", "null pointer"});
    refused([&](auto& c) { c.wanted.queries = small; }, {"wanted.queries", "(1, 1, 3, 2)", "(2, 4, 9, 8)"});
    refused([](auto& c) { c.wanted.keys = c.wanted.queries; }, {"wanted.keys", "(2, 4, 9, 8)", "(2, 2, 11, 8)"});
    refused([](auto& c) { c.wanted.keys = c.k; }, {"wanted.keys", "overlaps k"});
    refused([](auto& c) { c.wanted.queries = head_major(c.d_out.data(), {2, 4, 9, 8}); }, {"wanted.queries", "overlaps"});
    refused([](auto& c) { c.wanted.values = head_major(c.dk.data(), {2, 2, 11, 5}); }, {"wanted.values", "overlaps wanted.keys"});
    refused([](auto& c) { c.wanted.values = {c.dv.data(), {2, 2, 11, 5}, {0, 0, 0, 1}}; }, {"wanted.values", "elements overlap"});
    refused([](auto& c) { c.wanted.sinks = c.d_sinks; }, {"wanted.sinks", "there are no sinks"});
    {
        const good_backward call;
        const auto in = call.in();
        const auto wanted = [&](const auto& op, const positions& where) {
            using operation = std::remove_cvref_t<decltype(op)>;
            const typename operation::template gradients<float> none{};
            return error_of([&] { backward(op, inputs<float>{in.queries, in.keys, in.values, where}, call.saved, call.given, none); });
        };
        check_says(wanted(softmax_attention{.pattern = causal{}}, {}), {"softmax_attention: positions are not given, but q has 9 tokens and k 11"});
        CHECK(wanted(softmax_attention{.pattern = causal{}}, top_left()) == nothing_thrown);
    }
    {
        const tensor<float> none({1, 0, 3, 4}), rows({1, 0, 3, 1}); // no heads, so as many sinks as there should be
        const softmax_attention<>::gradients<float> wanted{{}, {small.data(), {1, 0, 1, 1}, {1, 1, 1, 1}}};
        CHECK(error_of([&] { backward(softmax_attention<>(), inputs<float>{none, none, none}, {none, rows}, {none}, wanted); }) == nothing_thrown);
    }

    good_backward call;
    sequential here;
    workspace memory(backward_workspace_bytes<float>(softmax_attention<>(), shapes_of(call.in()), here) - 1);
    check_says(error_of([&] { backward(softmax_attention<>(), call.in(), call.saved, call.given, call.wanted, execution(here, memory)); }),
               {"softmax_attention", "workspace", "gradient", "(2, 4, 9, 8)"});
}

TEST_CASE("backward: without a softmax there is no log_sum_exp, saved or given", "[attention]") {
    good_backward call;
    const linear_attention<> op;
    static_assert(DifferentiableAttention<linear_attention<>> && DifferentiableAttention<linear_attention<relu, causal>>);
    attend(op, call.in(), outputs<float>{call.out});
    backward(op, call.in(), {call.out}, {call.d_out}, {call.dq, call.dk, call.dv});
    check_says(error_of([&] { backward(op, call.in(), {call.out}, {call.d_out, call.d_rows}, {.queries = call.dq}); }),
               {"linear_attention", "d_out.log_sum_exp", "without a softmax"});
    check_says(error_of([&] { backward(op, call.in(), {call.out}, {call.d_rows}, {.queries = call.dq}); }), {"linear_attention", "d_out.values", "(2, 4, 9, 1)"});
}

TEST_CASE("backward: the gradients of an empty batch, of no queries and of no keys", "[attention]") {
    const softmax_attention<> op;
    for (const auto& [b, n, m] : {std::array<index_t, 3>{0, 3, 4}, {1, 0, 4}, {1, 3, 0}}) {
        const tensor<float> q({b, 2, n, 4}), k({b, 2, m, 4}), v({b, 2, m, 3}), d_out({b, 2, n, 3});
        tensor<float> out({b, 2, n, 3}), rows({b, 2, n, 1}), dq(q.shape()), dk(k.shape()), dv(v.shape());
        const inputs<float> in{q, k, v};
        attend(op, in, outputs<float>{out, rows});
        for (auto* t : {&dq, &dk, &dv}) std::fill_n(t->data(), t->shape().size(), guard<float>);
        backward(op, in, {out, rows}, {d_out}, {{dq, dk, dv}});
        for (auto* t : {&dq, &dk, &dv}) CHECK(std::all_of(t->data(), t->data() + t->shape().size(), [](float x) { return same_bits(x, 0.0f); }));
    }
}

} // namespace attn::testing
