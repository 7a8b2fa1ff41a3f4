// Which keys a query attends to, one by one: the indexer of sparse attention.
#pragma once

#include "../core/tensor.hpp"
#include "../kernel/attend/token_scores.hpp"
#include "../pattern/causal.hpp"
#include "../pattern/selected.hpp"
#include "attention.hpp"
#include "feature_map.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// How select_tokens chooses.
template <Pattern P = causal, FeatureMap F = relu>
struct token_selection {
    index_t count = 2048; ///< keys in a list
    P pattern = {};       ///< which keys there are to choose from, the same for all heads
    F score = {};         ///< what becomes of a head's score before it is weighed and added
};

namespace detail {

/// Throws attention_error unless tokens can be selected so. The values of `in` are the keys.
template <Scalar T, Pattern P, FeatureMap F>
void check_selection(const inputs<T>& in, const stored_view<const T>& weights, const token_selection<P, F>& rule) {
    constexpr auto name = "select_tokens";
    check_inputs(name, in);
    const auto& n = in.queries.shape();
    const auto& where = in.positions;
    check_view(name, "weights", weights);
    if (n.heads < 1) detail::raise(shape_error(name, "q", "has shape ", n, ": a score needs at least one head"));
    if (const shape wanted{n.batch, n.heads, n.tokens, 1}; weights.shape() != wanted)
        detail::raise(shape_error(name, "weights", "have shape ", weights.shape(), ", but for q of shape ", n, " ", wanted, " is needed"));
    if (rule.count < 1) detail::raise(argument_error(name, "rule.count", "is ", rule.count, ", but must be at least 1"));
    if (!where.first_query.shared() || !where.first_key.shared())
        detail::raise(argument_error(name, "positions", "differ between batch entries, but the lists of one table begin at one position"));
    if (n.tokens > 0 && where.first_key[0] < 0) detail::raise(argument_error(name, "positions.first_key", "is below 0"));
    attn::check(rule.pattern, pattern_context_of(name, where, shapes_of(in), n.heads));
    if (!heads_alike(rule.pattern)) detail::raise(argument_error(name, "rule.pattern", "differs between heads, which share a list"));
}

/// The table of the keys that score highest of those that a pattern shows. Stored: how they lie, in the tensor of `in` or in pages. All has
/// been checked.
template <class Stored, Scalar T, FeatureMap F>
tensor<index_t> choose_tokens(const inputs<T>& in, const stored_view<const T>& weights, const Pattern auto& pattern, index_t count,
                              const F& score, std::type_identity_t<const kernel::sequence_pages<T>*> pages, const call_execution& run) {
    using scores = kernel::token_scores<T, F, Stored>;
    using traits = kernel::query_block_traits<T>;
    const auto& n = in.queries.shape();
    tensor<index_t> table({n.batch, 1, n.tokens, count});
    const auto slice_bytes = bytes_for<scores>(shapes_of(in));
    run.reserve("select_tokens", "q", n, bytes_for_threads(run.concurrency(), slice_bytes));
    const slices memory(run.workspace().bytes().data(), slice_bytes);
    const kernel::visible_keys_of<T, std::remove_cvref_t<decltype(pattern)>> visible(pattern, shapes_of(in), in.positions);
    const kernel::token_selection_call<T> call{in, weights, visible, count, table, pages};
    const auto first = in.positions.first_query[0];
    const auto rows = traits::rows_of(n.tokens), tiles = tile_count(n.tokens, rows);
    run.for_each(n.batch * tiles, [&](index_t task, index_t slice) {
        const auto tokens = tile_at(task % tiles, first, n.tokens, rows, 1, traits::lane_count);
        auto own = memory[slice];
        scores(own, shapes_of(in), &call, &score).choose({.batch = task / tiles, .tokens = tokens, .first_row = tokens.first - first});
    });
    return table;
}

} // namespace detail

/// The keys that score highest for each query: the table of selected{table, 1, 1, first_query}, which all heads of the attention share.
///     score[i, j] = sum over heads h of weights[i, h] relu(q_i,h . k_j)        (or another function of rule.score)
/// The table (batch, 1, n, count) lists the positions of the `count` highest of the keys that the pattern shows, the earliest first, all if
/// fewer are shown, and then -1; of equal scores the earlier key is chosen, and a score that is NaN counts as the lowest. For queries q
/// (batch, heads, n, d) and keys k (batch, kv_heads, m, d) of the indexer, and weights (batch, heads, n, 1); 16-bit ones are read as they
/// are stored. Positions are those of the attention, one for all batch entries. Sums in T, in the order of channels and heads: the same
/// keys for every executor and cut. Time: 2 heads d flops a visible pair. Memory: O(m) numbers for each of the 48 queries, in float, that a
/// thread works on. Keys of a cache: cache/select_tokens.hpp. Throws attention_error if shapes do not fit, for a count below 1, for
/// positions that differ between batch entries, and for a pattern that differs between heads.
/// DeepSeek-AI 2025, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention".
template <StoredTensor Q, StoredTensor K, StoredTensor W, Pattern P = causal, FeatureMap F = relu>
[[nodiscard]] tensor<index_t> select_tokens(const Q& q, const K& k, const W& weights, const token_selection<P, F>& rule = {},
                                            const positions& where = {}, const detail::call_execution& run = {}) {
    using T = detail::computed_t<Q>;
    static_assert(std::same_as<T, detail::computed_t<K>> && std::same_as<T, detail::computed_t<W>>,
                  "attn: q, k and weights must have the same scalar type, of 16-bit ones float");
    const inputs<T> in{q, k, k, where};
    const stored_view<const T> of_heads = weights;
    detail::check_selection(in, of_heads, rule);
    return detail::choose_tokens<any_storage>(in, of_heads, rule.pattern, rule.count, rule.score, nullptr, run);
}

} // namespace attn
