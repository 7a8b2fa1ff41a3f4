// The gradients of biases: what is hidden by one, and what is refused. attn_random holds them to their definition.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

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

} // namespace

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
