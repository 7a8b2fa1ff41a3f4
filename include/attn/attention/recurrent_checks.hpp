// What recurrent attention refuses.
#pragma once

#include "../core/gradients.hpp"
#include "../kernel/tile_loader.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Calls f(name, view, whether it may have a number for each channel) for what a rule takes of each token.
void for_each_term(auto& rule, const auto& f) {
    if constexpr (requires { rule.log_decay; }) f("rule.log_decay", rule.log_decay, true);
    if constexpr (requires { rule.beta; }) f("rule.beta", rule.beta, false);
    if constexpr (requires { rule.a; }) {
        f("rule.a", rule.a, true);
        f("rule.b", rule.b, true);
    }
}

/// An operator for one sequence of a ragged batch: what the rule takes of its tokens, and its states. Throws shape_error unless there are
/// as many tokens and states as in the batch.
auto recurrent_entry(const auto& op, index_t entry, index_t entries, const row_range& tokens, index_t all) {
    auto own = op;
    for_each_term(own.rule, [&](std::string_view argument, auto& view, bool) {
        if (view.shape().batch != 1 || view.shape().tokens != all)
            detail::raise(
                shape_error(op.name, argument, "has shape ", view.shape(), ", but one batch entry of ", all, " tokens is needed"));
        view = view.slice({.tokens = tokens});
    });
    const auto take = [&](std::string_view argument, auto& view) {
        if (!view.data()) return;
        if (view.shape().batch != entries)
            detail::raise(shape_error(op.name, argument, "has shape ", view.shape(), ", but there are ", entries, " sequences"));
        view = view.slice({.batch = {entry, 1}});
    };
    take("first_state", own.first_state);
    take("last_state", own.last_state);
    return own;
}

/// Throws attention_error unless queries and keys are of the same tokens.
template <Scalar T>
void check_recurrent_tokens(std::string_view operation, const inputs<T>& in) {
    const auto &q = in.queries.shape(), &k = in.keys.shape();
    if (q.tokens != k.tokens) refuse(operation, "k", k, "q", q, "the tokens differ");
    for (index_t b = 0; b < q.batch; ++b)
        if (in.positions.first_query[b] != in.positions.first_key[b])
            detail::raise(argument_error(operation, "positions", "of queries begin at ", in.positions.first_query[b], ", but of keys at ",
                                         in.positions.first_key[b], ": they are of the same tokens"));
}

/// Throws argument_error unless all numbers of a view lie in a range, but for NaN, which is a result's affair.
template <Scalar T>
void check_range(std::string_view operation, std::string_view argument, const tensor_view<const T>& view, T low, T high,
                 std::string_view wanted) {
    using lanes = simd::lanes<T>;
    const auto rows = view.shape().channels == 1 ? view.transposed() : view;
    const auto channels = rows.shape().channels;
    for_each_row(rows.shape(), [&](index_t b, index_t h, index_t i) {
        simd::lane_bits outside;
        for (index_t c = 0; c < channels; c += lanes::size) {
            const auto x = kernel::load_channels<T>(rows.row(b, h, i), rows.strides().channels, c, channels - c);
            outside = outside || (x < lanes(low)).bits() || (x > lanes(high)).bits();
        }
        if (outside.value != 0)
            detail::raise(argument_error(operation, argument, "of shape ", view.shape(), " has a number, of batch entry ", b, " and head ",
                                         h, ", that is not ", wanted));
    });
}

/// Throws attention_error unless what the rule takes of each token fits the shapes of a call, and its numbers are what they must be.
void check_recurrent_terms(std::string_view operation, const auto& rule, const input_shapes& s) {
    const auto& k = s.keys;
    for_each_term(rule, [&](std::string_view argument, const auto& view, bool by_channel) {
        check_view(operation, argument, view);
        const auto& own = view.shape();
        const bool of_vectors = argument == "rule.a" || argument == "rule.b";
        const bool channels_fit = (own.channels == 1 && !of_vectors) || (by_channel && own.channels == k.channels);
        if ((own.batch != 1 && own.batch != k.batch) || (own.heads != 1 && own.heads != k.heads) || own.tokens != k.tokens || !channels_fit)
            refuse(operation, argument, own, "k", k,
                   of_vectors   ? "(batch or 1, kv_heads or 1, n, d_k) is needed"
                   : by_channel ? "(batch or 1, kv_heads or 1, n, 1 or d_k) is needed"
                                : "(batch or 1, kv_heads or 1, n, 1) is needed");
    });
    using T = typename std::remove_cvref_t<decltype(rule)>::scalar;
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    if constexpr (requires { rule.log_decay; }) check_range<T>(operation, "rule.log_decay", rule.log_decay, lowest, 0, "0 or less");
    if constexpr (requires { rule.beta; }) check_range<T>(operation, "rule.beta", rule.beta, 0, 2, "in 0 .. 2");
}

/// Throws attention_error unless the states have the shape (batch, kv_heads, d_k, d_v), and the last can be written while the rest is read.
template <Scalar T>
void check_recurrent_states(std::string_view operation, const inputs<T>& in, const auto& rule, const tensor_view<const T>& first,
                            const tensor_view<T>& last) {
    const auto& k = in.keys.shape();
    const shape wanted{k.batch, k.heads, k.channels, in.values.shape().channels};
    check_optional_input(operation, "first_state", first, wanted);
    check_optional(operation, "last_state", last, wanted);
    if (!last.data()) return;
    check_writable(operation, "last_state", last);
    const output_memory memory(operation, "last_state", last);
    check_apart_of_inputs(in, memory);
    for_each_term(rule, [&](std::string_view argument, const auto& view, bool) { memory.require_apart(argument, view); });
    if (first.data() != last.data() || first.strides() != last.strides()) memory.require_apart("first_state", first);
}

/// Checks the wanted gradients of what a rule takes of each token and of the first state, as an operator's check_gradients does. A ragged
/// batch has more states than entries of a batch: those of the first state, if it is given.
template <Scalar T>
void check_recurrent_gradients(std::string_view operation, const inputs<T>& in, const auto& rule, const tensor_view<const T>& first_state,
                               const recurrent_gradients<T>& wanted, const auto& check) {
    const auto &k = in.keys.shape(), &v = in.values.shape();
    const shape of_states{first_state.data() ? first_state.shape().batch : k.batch, k.heads, k.channels, v.channels};
    const auto visit = [&](std::string_view argument, const tensor_view<T>& view, const tensor_view<const T>& of) {
        check_wanted(operation, argument, view, is_given(of), of.shape(), check);
        if (view.data()) output_memory(operation, argument, view).require_apart("wanted.d_last_state", wanted.d_last_state);
    };
    const auto terms = rule.terms();
    visit("wanted.log_decay", wanted.log_decay, terms.log_decay);
    visit("wanted.beta", wanted.beta, terms.beta);
    visit("wanted.a", wanted.a, terms.erase);
    visit("wanted.b", wanted.b, terms.read);
    check("wanted.first_state", wanted.first_state, of_states);
    check_optional_input(operation, "wanted.d_last_state", wanted.d_last_state, of_states);
    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &wanted.first_state})
        if (view->data()) output_memory(operation, "wanted", *view).require_apart("wanted.d_last_state", wanted.d_last_state);
}

} // namespace attn::detail
