// Softmax attention by itself: calling it with log_sum_exp, biases that hide keys, and the definition it is held to.
#pragma once

#include "answers.hpp"
#include "catch.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/reference/softmax.hpp>

namespace attn::testing {

template <Scalar T, class Op, Executor E>
answer<T> attend_rows(const Op& op, const inputs<T>& in, E& executor) {
    auto result = no_answer<T>(op.output_shape(shapes_of(in)), true);
    workspace memory(workspace_bytes<T>(op, shapes_of(in), executor));
    attn::attend(op, in, result.out(), execution(executor, memory));
    return result;
}
template <Scalar T, class Op>
answer<T> attend_rows(const Op& op, const inputs<T>& in) {
    sequential here;
    return attend_rows(op, in, here);
}

/// Random numbers, one in every so many of which hides its key.
template <Scalar T>
tensor<T> hiding_bias(const shape& s, index_t every) {
    auto bias = random_tensor<T>(s, 4);
    for (index_t e = 0; e < s.size(); e += every) bias.data()[e] = -std::numeric_limits<T>::infinity();
    return bias;
}

/// The definition's result in double.
template <Scalar T, class Op>
answer<double> exact_rows(const Op& op, const inputs<T>& in) {
    auto exact = no_answer<double>(op.output_shape(shapes_of(in)), true);
    const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
    reference::softmax<double>({q, k, v, in.positions}, exact.out(), op.scale, op.score, op.pattern, op.sinks);
    return exact;
}

template <Scalar T, class Op>
void check_against_reference(const Op& op, const given<T>& in) {
    const auto ours = attend_rows<T>(op, in);
    const auto exact = exact_rows<T>(op, in);
    CHECK(largest_error(ours.values, exact.values) / epsilon<T> <= 64);
    CHECK(largest_error(ours.log_sum_exp, exact.log_sum_exp) / epsilon<T> <= 64);
}

} // namespace attn::testing
