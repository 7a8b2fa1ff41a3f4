// Which keys a query of linear attention sees, and which order of evaluation costs less for them.
#pragma once

#include "../../core/inputs.hpp"
#include "../../pattern/visible_end.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Multiply-adds in each order of evaluation, for queries that share a sum over the keys. pairs: of a query and a key that it sees.
struct linear_costs {
    double by_state, by_scores;

    /// own_pairs: those that the order by states also computes as scores, inside the chunks.
    linear_costs(double keys, double queries, double pairs, double own_pairs, double key_channels, double value_channels)
        : by_state((keys + queries) * key_channels * value_channels + own_pairs * (key_channels + value_channels)),
          by_scores(pairs * (key_channels + value_channels)) {}
};

/// The keys of a call that its queries see: of each query all before some key.
template <Scalar T, Pattern P>
struct linear_order {
    /// Whether queries of one head may see different keys.
    static constexpr bool causal = detail::follows_queries<decltype(at(std::declval<const P&>(), index{}, index{}))>;

    const inputs<T>& in;
    const P& pattern;

    /// How many keys a row of queries sees.
    index seen_by(index batch, index row) const { return before(batch, in.positions.first_query[batch] + row); }
    /// How many keys some query may see.
    index ever_seen(index batch) const { return before(batch, detail::everything - 1); }
    /// True if weights of pairs cost less than sums over the keys. chunk: queries that are scored with their own keys in any case.
    bool prefers_scores(index batch, index chunk) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const auto number = [](index n) { return static_cast<double>(n); };
        const auto least = number(seen_by(batch, 0)), most = number(seen_by(batch, q.tokens - 1));
        const auto queries = number(causal ? q.tokens : q.heads / k.heads * q.tokens);
        const auto own = causal ? queries * number(std::min(chunk, q.tokens)) / 2 : 0;
        const linear_costs costs(most, queries, queries * (least + most) / 2, own, number(k.channels), number(in.values.shape().channels));
        return costs.by_scores < costs.by_state;
    }

private:
    index before(index batch, index position) const {
        const auto end = detail::visible_end(at(pattern, batch, 0), position);
        return std::clamp<index>(end - in.positions.first_key[batch], 0, in.keys.shape().tokens);
    }
};

} // namespace attn::kernel
