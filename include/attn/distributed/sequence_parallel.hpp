// Attention over a sequence whose tokens lie on several ranks.
#pragma once

#include "linear_ranks.hpp"
#include "linformer_ranks.hpp"
#include "recurrent_ranks.hpp"
#include "softmax_ranks.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// An attention operator over the ranks of a communicator, each of which holds the part of q, k, v and the result that a partition says.
/// All make the same call, `attend(op, communicator, own inputs, ...)`, each with its own rows.
/// The result has the bits of the operator's call on one machine with all rows, for every number of ranks, every partition and every
/// communicator.
/// - softmax_attention and pointwise_attention, of any pattern and score function: keys and values travel to where the pattern's range
///   arithmetic says that they are seen, a piece of a few thousand keys at a time while the one before is computed with. What several see
///   goes round those who have about as many queries. A window is an exchange of halos, documents stay at home. Tables that the pattern
///   refers to must cover all queries and keys, those of the score function the rank's queries and all keys. Memory beyond that of the
///   call: two pieces of keys, the rank's own keys that others see once more, and two numbers a row.
/// - linear_attention, of any feature map and pattern: sums over the keys go from rank to rank, and where all queries see the same keys
///   then to all. Where they see different ones, each rank adds its keys to the sum of those before, a head after the other, so that fewer
///   heads than ranks leave ranks waiting. Keys travel as far as a block of a sum, of 16 or 2,048 keys, reaches over a rank's border, and
///   where rows see few; keys before the first query to its rank. Of performer_features the largest numbers of all keys, one a head, are
///   told first.
/// - simplified_linear_attention and focused_linear_attention: the same, and the convolution's halo. Every rank has the whole positional
///   encoding, and of convolution_input what it has of the queries.
/// - recurrent_attention: its states go from rank to rank, a head after the other, so that fewer heads than ranks leave ranks waiting. What
///   the rule takes of each token a rank has of its own tokens; the first rank's first state is used, and the last rank's last state
///   written. Queries and keys are cut alike.
/// - talking_heads_attention: the keys and values that a rank's queries see, from the first to the last, are gathered there before it
///   computes, and lie in its memory: of a window few, but where queries see all keys, these on every rank. Tables are as those of softmax
///   attention.
/// - linformer_attention, of any projections and pattern: the sums of a learned matrix, and of any ResumableProjection, go from rank to
///   rank, each of which adds its tokens, to a block of some hundred rows of a head after the other, so that fewer blocks than ranks leave
///   ranks waiting. Tokens travel as far as a part of a sum, of 128 tokens at most, reaches over a rank's border. A row of another
///   projection is made on the rank that holds the first token of its range, to which the others travel. Then all projected rows go to all
///   ranks. Every rank has the parameters of the whole sequence. Memory beyond that of the call: the projected rows of all heads, twice,
///   and which tokens are seen.
///
/// A rank that throws makes all throw: another's exception is a rank_error. Shapes, positions and partitions that differ between ranks are
/// found before a key is sent.
template <Attention A>
struct sequence_parallel {
    static constexpr std::string_view name = "sequence_parallel";

    A op;
    attn::partition partition; ///< of the operator's pattern, for its balance; any other is as right
};

/// Deduces the operator's type from an operator and a partition.
template <Attention A>
sequence_parallel(const A&, const partition&) -> sequence_parallel<A>;

namespace detail {

/// The rank's inputs, at their positions. Throws attention_error unless they are what the partition says.
template <Scalar T>
inputs<T> own_inputs(std::string_view operation, const partition& parts, index_t rank, index_t ranks, const inputs<T>& in) {
    constexpr std::string_view name = "sequence_parallel";
    if (parts.ranks() != ranks)
        detail::raise(argument_error(name, "partition", "is for ", parts.ranks(), " ranks, but the communicator has ", ranks));
    const auto &first_query = in.positions.first_query, &first_key = in.positions.first_key;
    if (!first_query.shared() || !first_key.shared() || first_query[0] != 0 || first_key[0] != 0)
        detail::raise(argument_error(name, "positions", "are given, but they are the partition's"));
    const auto own = parts.shapes(rank), given = shapes_of(in);
    const auto check = [&](std::string_view argument, const shape& has, const shape& expected) {
        if (has != expected)
            detail::raise(shape_error(name, argument, "has shape ", has, ", but rank ", rank, " of the partition holds ", expected));
    };
    check("q", given.queries, own.queries);
    check("k", given.keys, own.keys);
    check("v", given.values, own.values);
    auto placed = in;
    placed.positions = {.first_query = parts.positions().first_query[0] + parts.queries(rank).first,
                        .first_key = parts.positions().first_key[0] + parts.keys(rank).first};
    check_tensors(operation, placed);
    return placed;
}

/// Throws on all ranks unless all are well and make the same call of an operator. asked, fingerprint: numbers of what is to be computed,
/// and of what else must be alike.
template <Scalar T, Communicator C>
void agree_on_call(C& ranks, const std::exception_ptr& unfit, std::string_view operation, const partition& parts, const inputs<T>& in,
                   index_t asked, index_t fingerprint) {
    const auto& whole = parts.shapes();
    index_t kind = 0; // of the operator
    for (const char letter : operation) kind = kind * 31 % 1'000'003 + letter;
    agree(ranks, "sequence_parallel", unfit,
          {{"the operator", kind},
           {"what is asked of it, a number of which is", asked},
           {"the bytes of a number", static_cast<index_t>(sizeof(T))},
           {"the storage of k", static_cast<index_t>(in.keys.format())},
           {"the storage of v", static_cast<index_t>(in.values.format())},
           {"the batch", whole.queries.batch},
           {"the heads of q", whole.queries.heads},
           {"the heads of k", whole.keys.heads},
           {"the heads of v", whole.values.heads},
           {"the tokens of q", whole.queries.tokens},
           {"the tokens of k", whole.keys.tokens},
           {"the channels of k", whole.keys.channels},
           {"the channels of v", whole.values.channels},
           {"first_query", parts.positions().first_query[0]},
           {"first_key", parts.positions().first_key[0]},
           {"their cuts or patterns, a number of which is", fingerprint}});
}

/// Makes a Call(op, partition, rank, in, more...), calls check(in at its positions) and, when all ranks have agreed, compute(call, in at
/// its positions). Returns when all have been well. asked: a number of what is to be computed.
template <class Call, Attention A, Scalar T, Communicator C>
void on_all_ranks(const sequence_parallel<A>& op, C& ranks, const inputs<T>& in, index_t asked, const auto& check, const auto& compute,
                  const auto&... more) {
    const index_t rank = ranks.rank();
    std::optional<inputs<T>> placed;
    std::optional<Call> call;
    const auto unfit = failure_of([&] {
        placed = own_inputs(A::name, op.partition, rank, ranks.size(), in);
        rank_call<A, T>::check(op.op, op.partition, rank, *placed);
        check(*placed);
        call.emplace(op.op, op.partition, rank, *placed, more...);
    });
    agree_on_call(ranks, unfit, A::name, op.partition, in, asked, unfit ? 0 : call->fingerprint());
    agree(ranks, op.name, failure_of([&] { compute(*call, *placed); }));
}

/// A result, asked of all ranks: written to `out`, or to `made`, if that is given, a tensor that is made for it.
template <Attention A, Scalar T, Communicator C>
void attend_on_all(const sequence_parallel<A>& op, C& ranks, const inputs<T>& in, outputs<T> out, tensor<T>* made, const execution& run) {
    using call_type = rank_call<A, T>;
    const auto check = [&](const inputs<T>& own) {
        if (made) *made = tensor<T>(op.op.output_shape(shapes_of(own))), out = outputs<T>{*made};
        else check_outputs(op.op, own, out);
        with_storage(out.values, [&]<Storage S>(std::type_identity<S>) {
            run.reserve(op.name, "q", own.queries.shape(),
                        call_type::template workspace_bytes<S>(op.op, op.partition, ranks.rank(), run.concurrency()));
        });
    };
    on_all_ranks<call_type>(op, ranks, in, 0, check, [&](auto& call, const inputs<T>& own) { call.run(ranks, own, out, run); });
}

} // namespace detail

/// Computes the rank's rows of the result into `out`; `run` as in `attend`. All ranks call it. Throws attention_error before anything is
/// read or written, naming what does not fit, and rank_error if that, or another exception, is another rank's.
template <Attention A, Scalar T, Communicator C>
void attend(const sequence_parallel<A>& op, C& ranks, const inputs<T>& in, const outputs<T>& out, const detail::call_execution& run = {}) {
    detail::attend_on_all<A, T>(op, ranks, in, out, nullptr, run);
}

/// Attention over ranks, to a new tensor of the rank's rows: see attend(op, ranks, in, out, run).
template <Attention A, Scalar T, Communicator C>
[[nodiscard]] tensor<T> attend(const sequence_parallel<A>& op, C& ranks, const inputs<T>& in, const detail::call_execution& run = {}) {
    tensor<T> out;
    detail::attend_on_all<A, T>(op, ranks, in, outputs<T>{}, &out, run);
    return out;
}

/// Bytes of workspace that a rank's call needs with such an executor or execution, if its result is stored in S.
template <Storage S, Attention A>
std::size_t workspace_bytes(const sequence_parallel<A>& op, index_t rank, const detail::call_execution& run = {}) {
    return detail::rank_call<A, computed_in<S>>::template workspace_bytes<S>(op.op, op.partition, rank, run.concurrency());
}

} // namespace attn
