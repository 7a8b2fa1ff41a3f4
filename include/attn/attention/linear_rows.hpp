// What the linear attentions have in common: what they refuse, and calls of some rows of a longer sequence.
#pragma once

#include "../pattern/visible_end.hpp"
#include "attention.hpp"

#include <cmath>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Throws attention_error if the inputs, the pattern or eps do not suit a linear attention.
template <Scalar T, Pattern P>
void check_linear_attention(std::string_view operation, const inputs<T>& in, const P& pattern, double eps) {
    check_inputs(operation, in);
    static_assert(BeginningsPattern<P>, "attn: linear attention sums keys from the first on: its patterns are dense, causal, lengths, "
                                        "prefix, and what & and | make of them");
    if (!(eps >= 0 && std::isfinite(static_cast<T>(eps))))
        detail::raise(argument_error(operation, "eps", "is ", eps, ", but must be at least 0 and finite"));
    attn::check(pattern, pattern_context_of(operation, in.positions, shapes_of(in), in.queries.shape().heads));
}

/// The rows that a call of linear attention reads, where they are only some of a longer sequence's. `in` then numbers keys and what the
/// convolution reads as the sequence does.
template <Scalar T>
struct linear_rows {
    stored_view<const T> keys;
    index_t first_key = 0;                       ///< the number of the first of them
    index_t queries = 0;                         ///< of the sequence
    index_t first_query = 0;                     ///< the number of the call's first query
    stored_view<const T> convolution_input = {}; ///< as the convolution's grid numbers them, or none
    std::span<const T> key_maxima = {};          ///< of each head of keys, what a map of vectors takes of all of them, if it is known
};

/// An operator that is a linear attention, of some rows of a longer sequence.
template <class Op, class T>
concept TakesLinearRows = requires(const Op& op, const linear_rows<T>& rows) { op.workspace_bytes(input_shapes{}, index_t{1}, &rows); };

/// All rows of a call.
template <Scalar T>
linear_rows<T> all_rows(const inputs<T>& in) {
    return {in.keys, 0, in.queries.shape().tokens};
}

} // namespace attn::detail
