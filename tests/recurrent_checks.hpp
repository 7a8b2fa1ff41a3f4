// What tests of recurrent attention begin with: tokens, what a rule takes of each, and the definition of it.
#pragma once

#include "answers.hpp"

#include <attn/attention/recurrent_attention.hpp>
#include <attn/reference/recurrent_attention.hpp>

namespace attn::testing {

enum class recurrent_rule { linear, gated, delta, gated_delta, general };

struct named_rule {
    recurrent_rule value;
    const char* name;
};
inline constexpr std::array all_rules{named_rule{recurrent_rule::linear, "linear"}, named_rule{recurrent_rule::gated, "gated"},
                                      named_rule{recurrent_rule::delta, "delta"}, named_rule{recurrent_rule::gated_delta, "gated_delta"},
                                      named_rule{recurrent_rule::general, "general"}};

/// The sizes of a call, and of what a rule takes of each token: for each batch entry and head or for all of them, and of a decay for each channel
/// of the keys or one.
struct recurrent_sizes {
    index_t batch = 1, heads = 1, kv_heads = 1, tokens = 1, key_dim = 1, value_dim = 1;
    bool by_channel = false, one_batch = false, one_head = false;

    shape state() const { return {batch, kv_heads, key_dim, value_dim}; }
    shape term(index_t channels) const { return {one_batch ? 1 : batch, one_head ? 1 : kv_heads, tokens, channels}; }
};
inline std::string describe(const recurrent_sizes& s) {
    return "batch " + std::to_string(s.batch) + ", heads " + std::to_string(s.heads) + " / " + std::to_string(s.kv_heads) + ", " + std::to_string(s.tokens) + " tokens, d_k " +
           std::to_string(s.key_dim) + ", d_v " + std::to_string(s.value_dim) + (s.by_channel ? ", a decay for each channel" : "") +
           (s.one_batch ? ", terms for the whole batch" : "") + (s.one_head ? ", terms for all heads" : "");
}

/// f(rule, sizes, both in words) for every rule and such sizes, with a decay for each channel and without.
template <class F>
void for_each_rule(const std::vector<recurrent_sizes>& sizes, const F& f) {
    for (auto s : sizes)
        for (const bool by_channel : {false, true})
            for (const auto [kind, name] : all_rules) {
                s.by_channel = by_channel;
                f(kind, s, name + (": " + describe(s)));
            }
}

/// Some of the tokens, or all.
struct token_range {
    index_t first = 0, count = -1;
};

/// A sequence, as random as its numbers are: keys and b of a length of 1 or so, log decays in (-1, 0), betas in (0, 1), of which a is b times one.
template <Scalar T>
struct recurrent_tokens {
    recurrent_sizes size;
    tensor<T> queries, keys, values, log_decay, beta, a, b, first_state;

    explicit recurrent_tokens(const recurrent_sizes& s, unsigned seed = 1)
        : size(s), queries(random_tensor<T>({s.batch, s.heads, s.tokens, s.key_dim}, seed)),
          keys(random_tensor<T>({s.batch, s.kv_heads, s.tokens, s.key_dim}, seed + 1, of_length_1())), values(random_tensor<T>({s.batch, s.kv_heads, s.tokens, s.value_dim}, seed + 2)),
          log_decay(random_tensor<T>(s.term(s.by_channel ? s.key_dim : 1), seed + 3, T(0.5))), beta(random_tensor<T>(s.term(1), seed + 4, T(0.5))),
          a(s.term(s.key_dim)), b(random_tensor<T>(a.shape(), seed + 5, of_length_1())), first_state(random_tensor<T>(s.state(), seed + 6)) {
        for (index_t e = 0; e < log_decay.shape().size(); ++e) log_decay.data()[e] -= T(0.5);
        for (index_t e = 0; e < beta.shape().size(); ++e) beta.data()[e] += T(0.5);
        for (index_t e = 0; e < a.shape().size(); ++e) a.data()[e] = beta.data()[e / s.key_dim] * b.data()[e];
    }

    inputs<T> in(const token_range& range = {}) const { return {some(queries, range), some(keys, range), some(values, range)}; }
    /// f(operator) by a rule, of some of the tokens.
    template <class F>
    decltype(auto) with_rule(recurrent_rule kind, const token_range& range, const F& f) const {
        const auto of = [&](const tensor<T>& t) { return some(t, range); };
        switch (kind) {
        case recurrent_rule::gated:
            return f(attn::recurrent_attention{.rule = rule::gated<T>{of(log_decay)}});
        case recurrent_rule::delta:
            return f(attn::recurrent_attention{.rule = rule::delta<T>{of(beta)}});
        case recurrent_rule::gated_delta:
            return f(attn::recurrent_attention{.rule = rule::gated_delta<T>{of(log_decay), of(beta)}});
        case recurrent_rule::general:
            return f(attn::recurrent_attention{.rule = rule::general<T>{of(log_decay), of(a), of(b)}});
        default:
            return f(attn::recurrent_attention{.rule = rule::linear<T>{}});
        }
    }
    /// The definition in S, of numbers that convert(tensor) makes, from the first state or from zero.
    template <class S, class Convert>
    void define(recurrent_rule kind, bool from_first, const outputs<S>& out, const tensor_view<S>& last, const Convert& convert) const {
        const auto q = convert(queries), k = convert(keys), v = convert(values), g = convert(log_decay), be = convert(beta), a_ = convert(a), b_ = convert(b),
                   first = convert(first_state);
        using enum recurrent_rule;
        const auto if_taken = [](bool taken, const tensor<S>& t) { return taken ? t.view() : tensor_view<const S>(); };
        const reference::recurrent_terms<S> terms{if_taken(kind == gated || kind == gated_delta || kind == general, g), if_taken(kind == delta || kind == gated_delta, be),
                                                  if_taken(kind == general, a_), if_taken(kind == general, b_)};
        reference::recurrent_attention<S>(terms, 1 / std::sqrt(static_cast<double>(size.key_dim)), {q, k, v}, out, if_taken(from_first, first), last);
    }

private:
    T of_length_1() const { return unit_limit<T> / static_cast<T>(std::sqrt(static_cast<double>(size.key_dim))); }
    tensor_view<const T> some(const tensor<T>& t, const token_range& range) const {
        return range.count < 0 ? t.view() : tokens_of<T>(t, {range.first, range.count});
    }
};

/// What a call gives.
template <Scalar T>
struct recurrent_answer {
    tensor<T> values, last;

    explicit recurrent_answer(const recurrent_sizes& s) : values({s.batch, s.heads, s.tokens, s.value_dim}), last(s.state()) {
        std::fill_n(values.data(), values.shape().size(), guard<T>);
        std::fill_n(last.data(), last.shape().size(), guard<T>);
    }
};
template <Scalar T>
bool same_bits(const recurrent_answer<T>& x, const recurrent_answer<T>& y) {
    return same_bits(x.values, y.values) && same_bits(x.last, y.last);
}

template <Scalar T>
recurrent_answer<T> attend(const recurrent_tokens<T>& tokens, recurrent_rule kind, bool from_first, const detail::call_execution& run = {}) {
    recurrent_answer<T> result(tokens.size);
    tokens.with_rule(kind, {}, [&](auto op) {
        if (from_first) op.first_state = tokens.first_state;
        op.last_state = result.last;
        attn::attend(op, tokens.in(), outputs<T>{result.values}, run);
    });
    return result;
}
/// The definition, in double.
template <Scalar T>
recurrent_answer<double> reference_of(const recurrent_tokens<T>& tokens, recurrent_rule kind, bool from_first) {
    recurrent_answer<double> result(tokens.size);
    tokens.template define<double>(kind, from_first, {result.values}, result.last, [](const tensor<T>& t) { return reference::widen(t.view()); });
    return result;
}

} // namespace attn::testing
