// Which keys a row of linear attention sees, and in which order of evaluation it takes them.
#pragma once

#include "../../core/inputs.hpp"
#include "../../pattern/visible_end.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The keys of a call that its queries see: of each query all before some key. How a row takes them follows from the keys that it sees,
/// where they lie, and the channels; never from what else is in the call, so that a row has the same bits in any call.
template <Scalar T, Pattern P>
struct linear_order {
    /// Whether queries of one head may see different keys.
    static constexpr bool causal = detail::follows_queries<decltype(at(std::declval<const P&>(), index_t{}, index_t{}))>;
    /// Where queries see different keys, a sum over the keys grows by blocks that begin at absolute multiples of this: the keys of the
    /// block in which a row's keys end are scored, which costs as much as the square of it.
    static constexpr index_t causal_block = 16;

    const inputs<T>& in;
    const P& pattern;

    /// How many keys a row of queries sees.
    index_t seen_by(index_t batch, index_t row) const { return before(batch, in.positions.first_query[batch] + row); }
    /// How many keys some query may see.
    index_t ever_seen(index_t batch) const { return before(batch, detail::everything - 1); }

    /// How many keys, from the first on, a row takes as a sum over them; it is scored with the others. Never falls from row to row.
    index_t absorbed_by(index_t batch, index_t row) const {
        const auto seen = seen_by(batch, row);
        if (prefers_scores(seen)) return 0;
        return causal ? std::max<index_t>(0, seen - 1 - offset(batch, seen - 1, causal_block)) : seen; // where its last key's block begins
    }
    /// The end of the block that holds a key, be there so many keys or not. Blocks begin at absolute multiples of `block`.
    index_t block_end(index_t batch, index_t key, index_t block) const { return key - offset(batch, key, block) + block; }

private:
    /// Whether the weights of so many keys cost no more than a sum over them: for as many queries as keys, multiply-adds of (d_k + d_v) for
    /// each key against d_k d_v for the key and for the query.
    bool prefers_scores(index_t seen) const {
        const auto number = [](index_t n) { return static_cast<double>(n); };
        const auto d_k = number(in.keys.shape().channels), d_v = number(in.values.shape().channels);
        return number(seen) * (d_k + d_v) <= 2 * d_k * d_v;
    }
    /// How far behind a multiple of `block` a key's position is.
    index_t offset(index_t batch, index_t key, index_t block) const {
        const auto behind = (in.positions.first_key[batch] + key) % block;
        return behind < 0 ? behind + block : behind;
    }
    index_t before(index_t batch, index_t position) const {
        const auto end = detail::visible_end(at(pattern, batch, 0), position);
        return std::clamp<index_t>(end - in.positions.first_key[batch], 0, in.keys.shape().tokens);
    }
};

} // namespace attn::kernel
