// What tests of the gradient of recurrent attention begin with: what it reads beside the call, room for all that it writes, and the definition.
#pragma once

#include "catch.hpp"
#include "recurrent_checks.hpp"

#include <attn/attention/recurrent_backward.hpp>

namespace attn::testing {

/// What a gradient reads beside the call: gradients of the result and of the last state.
template <Scalar T>
struct given_to_recurrent {
    tensor<T> values, last;

    explicit given_to_recurrent(const recurrent_sizes& s) : values(random_tensor<T>({s.batch, s.heads, s.tokens, s.value_dim}, 21)), last(random_tensor<T>(s.state(), 22)) {}
};

/// Room for all gradients of a rule, all guards.
template <Scalar T>
struct recurrent_gradient_answer {
    std::array<tensor<T>, 8> all; ///< of queries, keys, values, log_decay, beta, a, b and the first state

    recurrent_gradient_answer(const recurrent_tokens<T>& t, recurrent_rule kind) {
        using enum recurrent_rule;
        const bool decays = kind != linear && kind != delta, corrects = kind == delta || kind == gated_delta;
        const auto like = [](const tensor<T>& of, bool there = true) { return there ? tensor<T>(of.shape()) : tensor<T>(); };
        all = {like(t.queries), like(t.keys), like(t.values), like(t.log_decay, decays), like(t.beta, corrects), like(t.a, kind == general), like(t.b, kind == general), like(t.first_state)};
        for (auto& one : all) std::fill_n(one.data(), one.shape().size(), guard<T>);
    }
    recurrent_gradients<T> wanted() {
        const auto view = [](tensor<T>& t) { return t.data() ? t.view() : tensor_view<T>{}; };
        recurrent_gradients<T> w;
        w.queries = view(all[0]), w.keys = view(all[1]), w.values = view(all[2]), w.log_decay = view(all[3]), w.beta = view(all[4]), w.a = view(all[5]), w.b = view(all[6]);
        w.first_state = view(all[7]);
        return w;
    }
    friend bool same_bits(const recurrent_gradient_answer& x, const recurrent_gradient_answer& y) {
        return std::equal(x.all.begin(), x.all.end(), y.all.begin(), [](const auto& a, const auto& b) { return testing::same_bits(a, b); });
    }
};

template <Scalar T>
recurrent_gradient_answer<T> recurrent_gradients_by_kernel(const recurrent_tokens<T>& t, recurrent_rule kind, const given_to_recurrent<T>& given, bool with_last,
                                          const detail::call_execution& run = {}) {
    recurrent_gradient_answer<T> result(t, kind);
    tensor<T> out(given.values.shape());
    auto wanted = result.wanted();
    if (with_last) wanted.d_last_state = given.last;
    t.with_rule(kind, {}, [&](auto op) {
        op.first_state = t.first_state;
        attn::attend(op, t.in(), outputs<T>{out});
        backward(op, t.in(), saved_outputs<T>{out}, output_gradients<T>{given.values}, wanted, run);
    });
    return result;
}

/// The definition, in double.
inline recurrent_gradient_answer<double> recurrent_gradients_by_definition(const recurrent_tokens<double>& t, recurrent_rule kind, const given_to_recurrent<double>& given, bool with_last) {
    recurrent_gradient_answer<double> result(t, kind);
    auto wanted = result.wanted();
    if (with_last) wanted.d_last_state = given.last;
    t.with_rule(kind, {}, [&](const auto& op) {
        const auto terms = op.rule.terms();
        reference::recurrent_gradients_of<double>({terms.log_decay, terms.beta, terms.erase, terms.read}, op.scale_for(t.size.key_dim), t.in(), given.values, wanted,
                                                  t.first_state);
    });
    return result;
}

template <Scalar T>
tensor<double> widened_tokens(const tensor<T>& t) {
    return reference::widen(t.view());
}
template <Scalar T>
recurrent_tokens<double> widened_tokens(const recurrent_tokens<T>& t) {
    recurrent_tokens<double> wide(t.size);
    wide.queries = widened_tokens(t.queries), wide.keys = widened_tokens(t.keys), wide.values = widened_tokens(t.values), wide.log_decay = widened_tokens(t.log_decay);
    wide.beta = widened_tokens(t.beta), wide.a = widened_tokens(t.a), wide.b = widened_tokens(t.b), wide.first_state = widened_tokens(t.first_state);
    return wide;
}

template <Scalar T>
void check_near_definition(const recurrent_gradient_answer<T>& ours, const recurrent_gradient_answer<double>& exact) {
    for (std::size_t n = 0; n < ours.all.size(); ++n) {
        INFO("gradient " << n);
        CHECK(largest_error(ours.all[n], exact.all[n]) <= 300 * epsilon<T> * std::max(1.0, largest_magnitude(exact.all[n])));
    }
}

} // namespace attn::testing
