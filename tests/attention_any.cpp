// Operators whose type is chosen at run time: the bits, the memory and the refusals of the one that is held.
#include "allocations.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layer_checks.hpp"

#include <attn/attention/any_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/ragged.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/attention/recurrent_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

namespace attn::testing {

namespace {

/// The held operator's results, in so much workspace as is said to be enough, are those of the operator itself.
template <Scalar T, Attention A>
void check_held(const A& op, index_t heads, index_t kv_heads) {
    INFO(A::name);
    const any_attention<T> any = op;
    CHECK(any.held_name() == A::name);
    const auto q = random_tensor<T>({2, heads, 37, 8}, 1), k = random_tensor<T>({2, kv_heads, 37, 8}, 2), v = random_tensor<T>({2, kv_heads, 37, 11}, 3);
    const inputs<T> in{q, A::traits.keys_are_queries ? q : k, v};
    const auto exact = attend(op, in);
    const auto copy = any; // shares the operator
    CHECK(same_bits(attend(copy, in), exact));
    sequential here;
    workspace own(workspace_bytes<T>(any, shapes_of(in), here));
    tensor<T> result(exact.shape());
    CHECK(allocations_in([&] { attend(any, in, outputs<T>{result}, execution(here, own)); }) == 0);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        workspace memory(workspace_bytes<T>(any, shapes_of(in), executor));
        const execution run(executor, memory);
        tensor<T> out(exact.shape());
        attend(any, in, outputs<T>{out}, run);
        CHECK(same_bits(out, exact));
        if constexpr (std::same_as<T, float>) {
            tensor<Eigen::bfloat16> narrow(exact.shape()), expected(exact.shape());
            workspace more(workspace_bytes<Eigen::bfloat16>(any, shapes_of(in), executor));
            attend(any, in, outputs<T>{narrow}, execution(executor, more));
            attend(op, in, outputs<T>{expected});
            CHECK(same_bits(narrow, expected));
        }
    });
    tensor<T> out(exact.shape()), sums(shape{2, heads, 37, 1});
    const auto problem = error_of([&] { attend(any, in, outputs<T>{out, sums}); });
    if constexpr (A::traits.has_log_sum_exp) {
        tensor<T> expected(sums.shape());
        attend(op, in, outputs<T>{out, expected});
        CHECK(problem == nothing_thrown);
        CHECK(same_bits(sums, expected));
    } else CHECK(problem == std::string(A::name) + ": log_sum_exp is asked for, but without a softmax there is none");
}

} // namespace

TEMPLATE_TEST_CASE("any_attention: each operator's bits in its own memory", "[attention]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    check_held<T>(softmax_attention<>{}, 4, 2);
    check_held<T>(softmax_attention{.pattern = causal{} & pattern::local{9}}, 2, 2);
    check_held<T>(linear_attention<elu_plus_one, causal>{}, 2, 1);
    const auto mixing = random_tensor<double>({1, 1, 3, 3}, 5);
    check_held<T>(talking_heads_attention<>{.logits_mix = mixing.view(), .weights_mix = mixing.view()}, 3, 3);
    const auto matrix = random_tensor<T>({1, 1, 6, 37}, 6);
    check_held<T>(linformer_attention{.key_projection = linear_projection{.matrix = matrix}}, 2, 2);
    tensor<T> rotations({2, 1, 8, 4});
    fill_random_projection<T>(rotations, 7);
    check_held<T>(lsh_attention{.rotations = rotations}, 2, 2);
}

TEST_CASE("any_attention: takes another operator as the program runs, in a layer too", "[attention]") {
    parameters weights;
    const auto x = random_rows<float>({2, 1, 9, 24}, 3);
    const auto layer_of = [&](const auto& op) { return random_multi_head<float>(weights, "m" + std::to_string(weights.names().size()), 24, 4, 2, 6, 6, op); };
    auto any = layer_of(any_attention<float>(softmax_attention{}));
    const multi_head<float> plain{.heads = 4, .kv_heads = 2, .q = any.q, .k = any.k, .v = any.v, .out = any.out};
    CHECK(same_bits(forward(any, {.tokens = x}), forward(plain, {.tokens = x})));
    any.attention = softmax_attention{.pattern = causal{}};
    const multi_head causal_one{.heads = 4, .kv_heads = 2, .q = any.q, .k = any.k, .v = any.v, .out = any.out, .attention = softmax_attention{.pattern = causal{}}};
    CHECK(same_bits(forward(any, {.tokens = x}), forward(causal_one, {.tokens = x})));
    CHECK(!same_bits(forward(any, {.tokens = x}), forward(plain, {.tokens = x})));
}

TEST_CASE("any_attention: sequences of a ragged batch have what the operator has of each token", "[attention]") {
    const std::vector<index_t> starts{0, 5, 5, 42, 60};
    const auto q = random_tensor<float>({1, 2, 60, 8}, 1), k = random_tensor<float>(q.shape(), 2), v = random_tensor<float>(q.shape(), 3);
    auto decay = random_tensor<float>({1, 2, 60, 1}, 4);
    for (index_t i = 0; i < decay.shape().size(); ++i) decay.data()[i] = -std::abs(decay.data()[i]);
    const recurrent_attention op{.rule = rule::gated{.log_decay = decay}};
    const inputs<float> in{q, k, v};
    CHECK(same_bits(attend(any_attention<float>(op), ragged{starts}, in), attend(op, ragged{starts}, in)));
}

TEST_CASE("any_attention: what does not fit is refused as by the operator that is held", "[attention]") {
    const auto x = random_tensor<float>({1, 2, 10, 4}, 1), thin = random_tensor<float>({1, 2, 10, 3}, 1);
    const any_attention<float> any = softmax_attention{.scale = INFINITY};
    CHECK(error_of([&] { (void)attend(any, x, thin, x); }) == error_of([&] { (void)attend(softmax_attention<>{}, x, thin, x); }));
    CHECK(error_of([&] { (void)attend(any, x, x, x); }) == "softmax_attention: scale is not finite");
    const any_attention<float> dense = softmax_attention<>{};
    tensor<float> out({1, 2, 10, 5});
    check_says(error_of([&] { attend(dense, x, x, x, out); }), {"any_attention: out ", "(1, 2, 10, 5)", "(1, 2, 10, 4)"});
    workspace little(8);
    sequential here;
    tensor<float> right(x.shape());
    check_says(error_of([&] { attend(dense, x, x, x, right, execution(here, little)); }), {"any_attention", "workspace"});
}

} // namespace attn::testing
