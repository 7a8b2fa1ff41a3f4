// A rank's part of a call: what is specialised for each operator, and what several of these share.
#pragma once

#include "partition.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// How a rank does its part of an operator: specialised for each that can be.
/// - `rank_call(op, partition, rank, in)`: finds what is seen of whom, and takes the memory for it.
/// - `check(op, partition, rank, in)`: throws attention_error if the operator's parameters do not fit the rank's inputs, at their
///   positions.
/// - `workspace_bytes<S>(op, partition, rank, concurrency)`: of the workspace, for a result that is stored in S.
/// - `fingerprint()`: of all that the ranks must have alike beside shapes and cuts.
/// - `run(communicator, in, out, run)`: computes.
template <class A, Scalar T>
struct rank_call {
    static_assert(!std::same_as<A, A>, "attn: sequence_parallel does not know this operator: its documentation names those that it takes");
};

/// How a rank does its part of an operator's gradient: specialised for each that can be, as rank_call is.
template <class A, Scalar T>
class rank_gradient {
    static_assert(!std::same_as<A, A>, "attn: over ranks, softmax attention, if its products are not rounded, and recurrent attention have "
                                       "a gradient; other operators have none yet");
};

/// Inputs of the shapes and positions of the whole call, stored as a rank's are, to check against: nothing of them can be read.
template <Scalar T>
inputs<T> whole_inputs(const partition& parts, const inputs<T>& in) {
    static constexpr T none{};
    const auto whole = [](const stored_view<const T>& own, const shape& s) {
        return stored_view<const T>(&none, own.format(), s, head_major(&none, s).strides());
    };
    const auto& s = parts.shapes();
    return {whole(in.queries, s.queries), whole(in.keys, s.keys), whole(in.values, s.values), parts.positions()};
}
/// Throws attention_error unless an operator's parameters fit the rank's queries and all keys, which come by, and its pattern all queries,
/// from which follows what is seen of whom.
template <Attention A, Scalar T>
void check_with_all_keys(const A& op, const partition& parts, const inputs<T>& in) {
    auto seen = whole_inputs(parts, in);
    seen.queries = in.queries;
    seen.positions.first_query = in.positions.first_query;
    op.check(seen);
    const auto heads = log_sum_exp_shape(op, parts.shapes()).heads;
    check_pattern(A::name, op.pattern, parts.shapes(), parts.positions(), heads);
    if constexpr (compares_positions<decltype(op.score)>)
        pattern_context_of(A::name, parts.positions(), parts.shapes(), heads).require_positions("score");
}
/// All rows of a call, of which a rank has those from `first` on: as if the others lay before and behind, which are never read.
inline tensor_part as_rows_from(index_t first, index_t all) { return {.tokens = {-first, all}}; }

} // namespace attn::detail
