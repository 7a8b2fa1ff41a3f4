// Who holds which part of a sequence, and what that costs each.
#pragma once

#include "../attention/attention.hpp"
#include "key_plan.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A call of attention on q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k) and v (batch, kv_heads, m, d_v), of which each of some
/// ranks holds the rows of some tokens: those of all batch entries and heads.
/// The queries are cut where the pairs that the pattern shows are shared out evenly, so that causal, windowed and packed sequences are
/// balanced; a rank may be left without. Keys are held with the queries of their positions, or where these are others in parts of even
/// size. Every rank makes the same partition by itself. To count the pairs takes as long as to make the schedules of a call: all but the
/// partly visible boxes are counted by multiplication.
class partition {
public:
    /// The partition of a call of these shapes and positions. Throws attention_error if the pattern does not fit them, if there is no rank,
    /// or if batch entries stand at different positions.
    partition(const Pattern auto& pattern, const input_shapes& whole, index_t ranks, const positions& where = {})
        : partition(pattern, whole, where) {
        if (ranks < 1) detail::raise(argument_error(name, "ranks", "must be at least 1, not ", ranks));
        const auto n = whole.queries.tokens, m = whole.keys.tokens;
        queries_.cuts = cuts_of(pattern, ranks);
        if (n == m && where_.first_query[0] == where_.first_key[0]) keys_ = queries_;
        else
            for (index_t r = 0; r <= ranks; ++r) keys_.cuts.push_back(share_of(m, r, ranks));
        find_work(pattern);
    }
    /// The partition with cuts of one's own: rank r holds the rows cuts[r] to cuts[r + 1] - 1. Throws attention_error as without them, and
    /// shape_error unless they rise from 0 to the number of tokens, as many of the queries as of the keys.
    partition(const Pattern auto& pattern, const input_shapes& whole, std::vector<index_t> query_cuts, std::vector<index_t> key_cuts,
              const positions& where = {})
        : partition(pattern, whole, where) {
        check_cuts("query_cuts", query_cuts, whole.queries.tokens);
        check_cuts("key_cuts", key_cuts, whole.keys.tokens);
        if (query_cuts.size() != key_cuts.size())
            detail::raise(shape_error(name, "key_cuts", "are ", key_cuts.size(), ", but query_cuts are ", query_cuts.size()));
        queries_.cuts = std::move(query_cuts);
        keys_.cuts = std::move(key_cuts);
        find_work(pattern);
    }

    /// How many ranks there are.
    index_t ranks() const { return queries_.ranks(); }
    /// The rows of q, and of the result, that a rank holds.
    row_range queries(index_t rank) const { return queries_.of(rank); }
    /// The rows of k and v that a rank holds.
    row_range keys(index_t rank) const { return keys_.of(rank); }
    /// The cuts between the ranks' rows of q.
    const detail::row_cuts& query_cuts() const { return queries_; }
    /// The cuts between the ranks' rows of k and v.
    const detail::row_cuts& key_cuts() const { return keys_; }
    /// The shapes of the whole call.
    const input_shapes& shapes() const { return whole_; }
    /// The positions of the whole call.
    const attn::positions& positions() const { return where_; }
    /// The shapes of a rank's part.
    input_shapes shapes(index_t rank) const {
        auto part = whole_;
        part.queries.tokens = queries(rank).count;
        part.keys.tokens = part.values.tokens = keys(rank).count;
        return part;
    }

    /// The visible pairs that a rank computes, over all batch entries and heads.
    index_t pairs(index_t rank) const { return work_[static_cast<std::size_t>(rank)].pairs; }
    /// Bytes of keys and values that a rank sends in a call of softmax attention, if they are stored in T: its own, and those that it
    /// passes on.
    template <Storage T = float>
    index_t bytes_sent(index_t rank) const {
        return work_[static_cast<std::size_t>(rank)].sent * bytes_of_key<T>();
    }
    /// Bytes of keys and values that a rank receives.
    template <Storage T = float>
    index_t bytes_received(index_t rank) const {
        return work_[static_cast<std::size_t>(rank)].received * bytes_of_key<T>();
    }

private:
    static constexpr std::string_view name = "partition";
    static constexpr index_t rows_together = 128; ///< that are counted as one until a cut falls among them

    struct work {
        index_t pairs = 0;
        index_t sent = 0, received = 0; ///< keys
    };

    partition(const Pattern auto& pattern, const input_shapes& whole, const attn::positions& where) : whole_(whole), where_(where) {
        if (!where.first_query.shared() || !where.first_key.shared())
            detail::raise(argument_error(name, "positions", "are given for each batch entry, but ranks hold the same tokens of all"));
        detail::check_shape<float>(name, "v", whole.values);
        detail::check_pattern(name, pattern, whole, where, whole.queries.heads);
        detail::check_positions(name, "positions.first_query", where.first_query[0], whole.queries.tokens);
        detail::check_positions(name, "positions.first_key", where.first_key[0], whole.keys.tokens);
        if (whole.values.tokens != whole.keys.tokens) detail::refuse(name, "v", whole.values, "k", whole.keys, "the tokens differ");
    }
    static void check_cuts(std::string_view argument, const std::vector<index_t>& cuts, index_t tokens) {
        if (cuts.size() < 2 || cuts.front() != 0 || cuts.back() != tokens || !std::ranges::is_sorted(cuts))
            detail::raise(shape_error(name, argument, "must rise from 0 to the ", tokens, " tokens, one more than there are ranks"));
    }

    /// What the first `rank` of `ranks` have of a number.
    static index_t share_of(index_t all, index_t rank, index_t ranks) { return all / ranks * rank + all % ranks * rank / ranks; }
    /// Visible pairs of some rows.
    index_t pairs_of(const Pattern auto& pattern, const row_range& rows) const {
        index_t pairs = 0;
        const auto &q = whole_.queries, &k = whole_.keys;
        const index_t alike = heads_alike(pattern) ? std::max<index_t>(1, q.heads) : 1;
        for (index_t b = 0; b < q.batch; ++b)
            for (index_t h = 0; h < q.heads; h += alike)
                pairs += alike * visited_pairs(at(pattern, b, h), where_.first_query[0] + rows.first, rows.count, where_.first_key[0],
                                               k.tokens, 16, 16)
                                     .visible;
        return pairs;
    }
    /// The cuts between ranks: each is where the pairs before it are nearest to the share of the ranks before it.
    std::vector<index_t> cuts_of(const Pattern auto& pattern, index_t ranks) const {
        const auto n = whole_.queries.tokens;
        std::vector<index_t> blocks; // pairs of each, and then cuts
        index_t total = 0;
        for (index_t first = 0; first < n; first += rows_together) {
            blocks.push_back(pairs_of(pattern, {first, std::min(rows_together, n - first)}));
            total += blocks.back();
        }
        std::vector<index_t> cuts{0};
        index_t block = 0, before = 0, row = 0,
                of_rows = 0; // the block, the pairs before it, a row of it and the pairs of those before that
        for (index_t rank = 1; rank < ranks; ++rank) {
            if (total == 0) {
                cuts.push_back(share_of(n, rank, ranks));
                continue;
            }
            const auto share = share_of(total, rank, ranks);
            while (before + blocks[static_cast<std::size_t>(block)] < share) {
                before += blocks[static_cast<std::size_t>(block++)];
                row = of_rows = 0;
            }
            while (before + of_rows < share) {
                const auto next = of_rows + pairs_of(pattern, {block * rows_together + row, 1});
                if (before + next - share > share - before - of_rows) break;
                of_rows = next;
                ++row;
            }
            cuts.push_back(block * rows_together + row);
        }
        cuts.push_back(n);
        return cuts;
    }
    template <Pattern P>
    void find_work(const P& pattern) {
        const kernel::visible_keys_of<float, P> visible(pattern, whole_, where_);
        const detail::key_plan plan({visible, whole_.queries, where_.first_query[0], where_.first_key[0]}, queries_, keys_);
        work_.resize(static_cast<std::size_t>(ranks()));
        for (index_t rank = 0; rank < ranks(); ++rank) work_[static_cast<std::size_t>(rank)].pairs = pairs_of(pattern, queries(rank));
        for (index_t number = 0; number < plan.pieces(); ++number)
            plan.for_each_transfer(number, [&](const detail::key_transfer& t) {
                work_[static_cast<std::size_t>(t.from)].sent += t.rows.count;
                work_[static_cast<std::size_t>(t.to)].received += t.rows.count;
            });
    }
    template <Storage T>
    index_t bytes_of_key() const {
        const auto &k = whole_.keys, &v = whole_.values;
        return k.batch * (k.heads * k.channels + v.heads * v.channels) * static_cast<index_t>(sizeof(T));
    }

    input_shapes whole_;
    attn::positions where_;
    detail::row_cuts queries_, keys_;
    std::vector<work> work_; ///< of each rank
};

} // namespace attn
