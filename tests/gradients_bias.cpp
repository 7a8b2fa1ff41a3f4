// The gradients of biases: tables that scores are added from, in every shape that they may be repeated from.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/reference/softmax_gradients.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/soft_cap.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// A call, what it wrote, and the gradient of a loss by that.
template <Scalar T>
struct biased_call {
    given<T> in;
    answer<T> saved, loss;

    template <class Op>
    biased_call(const Op& op, const problem& p) : in(random_given<T>(p)), saved(no_answer<T>(op.output_shape(p.shapes()), true)), loss(no_answer<T>(op.output_shape(p.shapes()), true)) {
        attend(op, inputs<T>(in), saved.out());
        loss.values = random_tensor<T>(saved.values.shape(), 7);
        loss.log_sum_exp = random_tensor<T>(saved.log_sum_exp.shape(), 8);
    }
    template <class Op, class E>
    void backward(const Op& op, const typename Op::template gradients<T>& wanted, E& executor) const {
        attn::backward(op, inputs<T>(in), {saved.values, saved.log_sum_exp}, {loss.values, loss.log_sum_exp}, wanted, executor);
    }
};

/// The definition: dx, times what functions behind the bias make of it, summed over all pairs that read the same number.
template <Scalar T, class Op, class Slope>
tensor<double> exact_bias_gradient(const Op& op, const biased_call<T>& call, const additive_bias<T>& bias, const Slope& slope_behind) {
    const auto wide = [](const tensor<T>& t) { return reference::widen(t.view()); };
    const auto q = wide(call.in.queries), k = wide(call.in.keys), v = wide(call.in.values), d_out = wide(call.loss.values), d_rows = wide(call.loss.log_sum_exp);
    const auto& s = bias.bias.shape();
    tensor<double> sum(s);
    std::fill_n(sum.data(), s.size(), 0.0);
    reference::softmax_gradients<double>({q, k, v, call.in.positions}, {d_out, d_rows}, {}, {}, op.scale, op.score, op.pattern, op.sinks,
                                         [&](index_t b, index_t h, index_t i, index_t j, double x, double dx) {
                                             const attn::detail::table_place at(s, b, h);
                                             const auto row = s.tokens == 1 ? 0 : i - bias.first_query.repeated(b), column = s.channels == 1 ? 0 : j - bias.first_key.repeated(b);
                                             sum(at.entry, at.head, row, column) += dx * slope_behind(b, h, i, j, x);
                                         });
    return sum;
}

template <Scalar T, class Op, class Slope, class Wanted>
void check_bias(const Op& op, const problem& p, const additive_bias<T>& bias, const Slope& slope_behind, const Wanted& wanted_of) {
    INFO(describe(p) << ", bias " << to_string(bias.bias.shape()));
    const biased_call<T> call(op, p);
    const auto exact = exact_bias_gradient(op, call, bias, slope_behind);
    tensor<T> expected(bias.bias.shape());
    sequential here;
    call.backward(op, wanted_of(expected.view()), here);
    const auto terms = static_cast<double>(p.batch * p.heads * p.queries * p.keys) / static_cast<double>(std::max<index_t>(1, bias.bias.shape().size()));
    CHECK(largest_error(expected, exact) <= 64 * epsilon<T> * (1 + std::sqrt(terms)) * std::max(1.0, largest_magnitude(exact)));
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO("on " << name);
        tensor<T> ours(bias.bias.shape());
        std::fill_n(ours.data(), ours.shape().size(), guard<T>);
        call.backward(op, wanted_of(ours.view()), executor);
        CHECK(same_bits(ours, expected));
    });
}

const std::vector<problem> bias_problems{{2, 4, 2, 61, 150, 8, 9}, {1, 2, 1, 290, 300, 4, 4}, {2, 2, 2, 5, 9, 3, 2, {.first_query = 3}}};
std::vector<shape> shapes_for(const problem& p) {
    const auto n = p.queries + p.positions.first_query[0], m = p.keys;
    return {{p.batch, p.heads, n, m}, {1, p.heads, n, m}, {p.batch, 1, n, m}, {1, 1, n, m}, {1, p.heads, 1, m}, {1, p.heads, n, 1}, {1, 1, 1, 1}};
}

} // namespace

TEMPLATE_TEST_CASE("bias gradient: every shape that a bias may be repeated from", "[attention][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto one = [](auto...) { return 1.0; };
    for (const auto& p : bias_problems)
        for (const auto& s : shapes_for(p)) {
            const auto table = random_tensor<T>(s, 5);
            const additive_bias<T> bias{table};
            const auto wanted = [](const tensor_view<T>& to) { return typename softmax_attention<dense, additive_bias<T>>::template gradients<T>{{}, {}, {to}}; };
            check_bias<T>(softmax_attention<dense, additive_bias<T>>{.score = bias}, p, bias, one, wanted);
        }
}

TEMPLATE_TEST_CASE("bias gradient: in a chain, and with patterns", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const problem p{2, 4, 2, 61, 150, 8, 9};
    const auto table = random_tensor<T>({1, 4, 61, 150}, 5);
    const additive_bias<T> bias{table};
    const std::vector<double> slopes{0.1, 0.2, 0.3, 0.4};
    const auto slope_of_cap = [&](index_t b, index_t h, index_t i, index_t j, double x) { // 3 tanh(y / 3), y what the bias made
        const double y = bias.at(b, h)(2 * std::tanh(x / 2), i, j);
        return 1 - std::pow(std::tanh(y / 3), 2);
    };
    const composed_score chain{soft_cap{2}, bias, soft_cap{3}, alibi(slopes)};
    using chain_type = std::remove_const_t<decltype(chain)>;
    const auto wanted_of = []<class Op>(const Op&) {
        return [](const tensor_view<T>& to) {
            typename Op::template gradients<T> wanted;
            std::get<1>(wanted.score).bias = to;
            return wanted;
        };
    };
    const softmax_attention<causal, chain_type> past{.score = chain};
    check_bias<T>(past, p, bias, slope_of_cap, wanted_of(past));
    const auto some = local{5} | strided{7};
    const softmax_attention<std::remove_const_t<decltype(some)>, chain_type> passes{.score = chain, .pattern = some};
    check_bias<T>(passes, p, bias, slope_of_cap, wanted_of(passes));
}

TEST_CASE("bias gradient: what is hidden by the bias itself has none, and wrong shapes are refused", "[attention]") {
    const problem p{1, 1, 1, 6, 9, 4, 3};
    auto table = random_tensor<float>({1, 1, 6, 9}, 5);
    table(0, 0, 2, 4) = -std::numeric_limits<float>::infinity();
    const softmax_attention<dense, additive_bias<float>> op{.score = {table}};
    const biased_call<float> call(op, p);
    tensor<float> to({1, 1, 6, 9}), wrong({1, 1, 6, 8});
    sequential here;
    call.backward(op, {{}, {}, {to}}, here);
    CHECK(to(0, 0, 2, 4) == 0);
    CHECK(to(0, 0, 2, 5) != 0);
    check_says(error_of([&] { call.backward(op, {{}, {}, {wrong}}, here); }), {"softmax_attention", "wanted.score.bias", "(1, 1, 6, 8)", "(1, 1, 6, 9)"});
    check_says(error_of([&] { call.backward(op, {{}, {}, {table}}, here); }), {"softmax_attention", "wanted.score.bias", "overlaps the bias of the score"});
}

} // namespace attn::testing
