// Which of a cache's keys a query attends to.
#pragma once

#include "../attention/select_tokens.hpp"
#include "../kernel/attend/pages.hpp"
#include "turned_queries.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The keys of a sequence that score highest for the queries of its last tokens, q (1, heads, n, d) with weights (1, heads, n, 1): the
/// table that select_tokens makes of its keys as one tensor at their positions, for selected{table, 1, 1, keys.size() - n}. Keys are read
/// as attend(op, q, keys) reads them; those that are evicted are not chosen, and values are not looked at.
///     key_value_pool<float> index_pool({.kv_heads = 1, .key_channels = 128, .value_channels = 1}, 64);
///     const auto table = select_tokens(index_q, index_keys, weights);
///     attend(softmax_attention{.pattern = causal{} & selected{table, 1, 1, tokens.size() - 1}}, q, tokens);
/// Throws attention_error as both of them do.
template <Scalar T, Pattern P = causal, FeatureMap F = relu>
[[nodiscard]] tensor<index_t> select_tokens(const detail::read_stored<T>& q, const sequence<T>& keys, const detail::read_stored<T>& weights,
                                            const token_selection<P, F>& rule = {}, const detail::call_execution& run = {}) {
    constexpr auto name = "select_tokens";
    static constexpr T nowhere{};
    detail::check_view(name, "q", q);
    const auto& n = q.shape();
    if (n.batch != 1) detail::raise(shape_error(name, "q", "has shape ", n, ": a sequence is one batch entry"));
    if (n.tokens > keys.size())
        detail::raise(shape_error(name, "q", "has shape ", n, ", but the sequence has ", keys.size(), " tokens: they are of its last"));
    const auto held = keys.positions();
    const auto& l = keys.pool().layout();
    // Shapes only: where the rows lie, the pages say.
    const stored_view<const T> rows(&nowhere, shape{1, l.kv_heads, held.count, l.key_channels}, {0, 0, 0, 0});
    inputs<T> in{q, rows, rows, {.first_query = keys.size() - n.tokens, .first_key = held.first}};
    const stored_view<const T> of_heads = weights;
    detail::check_selection(in, of_heads, rule);
    const detail::turned_queries<T> queries(in.queries, keys.size() - n.tokens, keys);
    queries.check(name);
    tensor<T> turned(queries.are_others() ? n : shape{});
    if (queries.are_others()) {
        queries.write(turned);
        in.queries = turned;
    }
    const auto pages = keys.view();
    return detail::with_kept_keys(keys, rule.pattern, [&](const auto& pattern) {
        return detail::choose_tokens<kernel::paged_storage>(in, of_heads, pattern, rule.count, rule.score, &pages, run);
    });
}

} // namespace attn
