// Gradients beside scores that are exact but large: log_sum_exp cannot tell the sum of the weights there, which are right all the same.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/lsh_backward.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/reference/lsh_attention.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/talking_heads.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// Sizes of scores, and whether small whole numbers still count beside them.
template <Scalar T>
std::vector<std::pair<T, bool>> score_sizes() {
    const T huge = std::numeric_limits<T>::max() / 4;
    std::vector<std::pair<T, bool>> sizes{{T{0}, true}, {T{20}, true}, {T{100}, true}, {T{1000}, true}, {T{-10000}, true}, {T{-1e9}, false}, {static_cast<T>(1e16), false}, {-huge, false}};
    return sizes;
}

/// Whole numbers from -1 to 1.
template <Scalar T>
tensor<T> signs(const shape& s, unsigned seed) {
    tensor<T> t(s);
    std::mt19937 random(seed);
    std::generate_n(t.data(), s.size(), [&] { return static_cast<T>(static_cast<int>(random() % 3) - 1); });
    return t;
}

template <Scalar T>
void check_near(const char* name, const tensor<T>& ours, const tensor<double>& exact) {
    INFO("of the " << name);
    CHECK(largest_error(ours, exact) <= 8 * epsilon<T> * std::max(1.0, 4 * largest_magnitude(exact)));
}

template <Scalar T>
struct exact_scores {
    tensor<T> q, k, v, bias;

    exact_scores(T size, bool counts, index_t heads, index_t kv_heads) : q(signs<T>({2, heads, 37, 4}, 1)), k(signs<T>({2, kv_heads, 300, 4}, 2)), v(random_tensor<T>({2, kv_heads, 300, 3}, 3)), bias({1, 1, 37, 300}) {
        std::fill_n(bias.data(), bias.shape().size(), size);
        if (!counts) std::fill_n(q.data(), q.shape().size(), T{0});
    }
    inputs<T> in() const { return {q, k, v, top_left()}; }
};

template <Scalar T>
tensor<double> in_double(const tensor<T>& t) {
    return reference::widen(t.view());
}

} // namespace

TEMPLATE_TEST_CASE("gradients beside large scores: softmax attention, its sinks and bias", "[attention][gradients][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto check = [](T size, bool counts, const auto& pattern) {
        INFO("scores about " << size);
        const exact_scores<T> call(size, counts, 4, 2);
        const std::vector<double> sinks{static_cast<double>(size), -std::numeric_limits<double>::infinity(), static_cast<double>(size), static_cast<double>(size)};
        const softmax_attention op{.scale = 1.0, .score = additive_bias<T>(call.bias), .pattern = pattern, .sinks = sinks};
        auto saved = no_answer<T>(op.output_shape(shapes_of(call.in())), true);
        attend(op, call.in(), saved.out());
        const auto d_out = random_tensor<T>(saved.values.shape(), 7), d_rows = random_tensor<T>(saved.log_sum_exp.shape(), 8);
        tensor<T> dq(call.q.shape()), dk(call.k.shape()), dv(call.v.shape()), d_sinks({1, 4, 1, 1}), d_bias(call.bias.shape());
        backward(op, call.in(), {saved.values, saved.log_sum_exp}, {d_out, d_rows}, {{dq, dk, dv}, d_sinks, {d_bias}});

        const auto q = in_double(call.q), k = in_double(call.k), v = in_double(call.v), values = in_double(d_out), rows = in_double(d_rows);
        tensor<double> exact_q(q.shape()), exact_k(k.shape()), exact_v(v.shape()), exact_sinks({1, 4, 1, 1}), exact_bias(call.bias.shape());
        std::fill_n(exact_bias.data(), exact_bias.shape().size(), 0.0);
        const auto score = op.score;
        reference::softmax_gradients<double>({q, k, v}, {values, rows}, {exact_q, exact_k, exact_v}, exact_sinks.view(), op.scale, score, op.pattern, sinks,
                                             [&](index_t, index_t, index_t i, index_t j, double, double dx) { exact_bias(0, 0, i, j) += dx; });
        check_near("queries", dq, exact_q);
        check_near("keys", dk, exact_k);
        check_near("values", dv, exact_v);
        check_near("sinks", d_sinks, exact_sinks);
        check_near("bias", d_bias, exact_bias);
    };
    for (const auto& [size, counts] : score_sizes<T>()) {
        check(size, counts, dense{});
        check(size, counts, causal{} & (local{3, 3} | strided{5}));
    }
}

TEMPLATE_TEST_CASE("gradients beside large scores: talking heads and their mixings", "[attention][gradients][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto& [size, counts] : score_sizes<T>())
        for (const bool mixes_weights : {false, true}) {
            INFO("scores about " << size << (mixes_weights ? ", weights mixed" : ""));
            const exact_scores<T> call(size, counts, 2, 2);
            const auto logits_mix = signs<double>({1, 1, 2, 2}, 5), weights_mix = random_tensor<double>({1, 1, 2, 2}, 6);
            const std::vector<double> sinks{static_cast<double>(size), -std::numeric_limits<double>::infinity()};
            talking_heads_attention<causal, additive_bias<T>> op{.logits_mix = logits_mix, .scale = 1.0, .score = additive_bias<T>(call.bias), .sinks = sinks};
            if (mixes_weights) op.weights_mix = weights_mix;
            const auto s = shapes_of(call.in());
            auto saved = no_answer<T>(op.output_shape(s), op.log_sum_exp_shape(s));
            attend(op, call.in(), saved.out());
            const auto d_out = random_tensor<T>(saved.values.shape(), 7), d_rows = random_tensor<T>(saved.log_sum_exp.shape(), 8);
            tensor<T> dq(call.q.shape()), dk(call.k.shape()), dv(call.v.shape()), d_logits({1, 1, 2, 2}), d_weights({1, 1, 2, 2}), d_sinks({1, 2, 1, 1});
            typename decltype(op)::template gradients<T> wanted{{{dq, dk, dv}, d_logits}};
            wanted.sinks = d_sinks;
            if (mixes_weights) wanted.weights_mix = d_weights;
            backward(op, call.in(), {saved.values, saved.log_sum_exp}, {d_out, d_rows}, wanted);

            const auto q = in_double(call.q), k = in_double(call.k), v = in_double(call.v), values = in_double(d_out), rows = in_double(d_rows);
            tensor<double> exact_q(q.shape()), exact_k(k.shape()), exact_v(v.shape()), exact_logits({1, 1, 2, 2}), exact_weights({1, 1, 2, 2}), exact_sinks({1, 2, 1, 1});
            mixed_head_gradients<double> exact{{exact_q, exact_k, exact_v}, exact_logits};
            exact.sinks = exact_sinks;
            if (mixes_weights) exact.weights_mix = exact_weights;
            reference::talking_heads_gradients<double>({q, k, v}, {values, rows}, exact, op.logits_mix, op.logits_bias, op.weights_mix, op.weights_bias, op.scale, op.score, op.pattern, op.sinks);
            check_near("queries", dq, exact_q);
            check_near("keys", dk, exact_k);
            check_near("values", dv, exact_v);
            check_near("logits_mix", d_logits, exact_logits);
            check_near("sinks", d_sinks, exact_sinks);
            if (mixes_weights) check_near("weights_mix", d_weights, exact_weights);
        }
}

TEMPLATE_TEST_CASE("gradients beside large scores: LSH attention, whose weights sum to 1 over all rounds", "[attention][gradients][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto size : {T{1}, T{100}, T{10000}, T{1e9}}) {
        INFO("scores about " << size);
        tensor<T> q({1, 1, 50, 2}), rotations({2, 1, 2, 2});
        for (index_t i = 0; i < 50; ++i) q(0, 0, i, 0) = size, q(0, 0, i, 1) = 0; // in one bucket, whose keys are (1, 0)
        for (index_t e = 0; e < 8; ++e) rotations.data()[e] = e % 4 == 0 ? T{1} : T{0};
        const auto v = random_tensor<T>({1, 1, 50, 3}, 2);
        const lsh_attention<T> op{.rotations = rotations, .chunk = 8, .scale = 1.0};
        auto saved = no_answer<T>(v.shape(), true);
        attend(op, inputs<T>{q, q, v}, saved.out());
        const auto d_out = random_tensor<T>(v.shape(), 3);
        tensor<T> dq(q.shape()), dv(v.shape());
        backward(op, inputs<T>{q, q, v}, {saved.values, saved.log_sum_exp}, {d_out}, {dq, {}, dv});

        const auto wide_q = in_double(q), wide_v = in_double(v), values = in_double(d_out);
        tensor<double> exact_q(q.shape()), exact_v(v.shape());
        const auto buckets = lsh_buckets(q, rotations);
        reference::lsh_gradients<double>({wide_q, wide_q, wide_v}, {values}, {exact_q, {}, exact_v}, buckets.view(), 8, false, 1.0);
        check_near("values", dv, exact_v);
        check_near("tokens", dq, exact_q);
    }
}

TEST_CASE("gradients of long sequences take no memory that grows with threads times tokens", "[attention][gradients]") {
    const auto bytes_of = [](const auto& op, index_t n) {
        const shape s{1, 1, n, 128};
        return static_cast<double>(op.template backward_workspace_bytes<float>({s, s, s}, 16));
    };
    const auto heads = random_tensor<double>({1, 1, 1, 1}, 1);
    const talking_heads_attention<> talking{.logits_mix = heads, .weights_mix = heads};
    for (const index_t n : {1 << 14, 1 << 17}) {
        INFO(n << " tokens");
        CHECK(bytes_of(softmax_attention{}, n) <= 16 * 2e6 + 8.0 * static_cast<double>(n));
        CHECK(bytes_of(talking, n) <= 16 * 2e6 + 8.0 * static_cast<double>(n));
    }
}

} // namespace attn::testing
