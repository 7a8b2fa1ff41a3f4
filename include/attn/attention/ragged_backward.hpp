// The gradient of an operator on ragged batches.
#pragma once

#include "backward.hpp"
#include "ragged.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Whether an operator's gradients beside those of its inputs are of tokens and sequences, so that each sequence has its own.
template <class A, class T>
concept HasGradientsOfEntries = requires(const gradients_of<A, T>& wanted) { wanted.of_entry(index_t{}, row_range{}); };

/// The gradients of entry e.
template <DifferentiableAttention A, Scalar T>
gradients_of<A, T> gradients_of_entry(const ragged& batch, const gradients_of<A, T>& wanted, index_t e) {
    gradients_of<A, T> own{};
    if constexpr (HasGradientsOfEntries<A, T>) own = wanted.of_entry(e, batch.keys(e));
    own.queries = wanted.queries.slice({.tokens = batch.queries(e)});
    own.keys = wanted.keys.slice({.tokens = batch.keys(e)});
    own.values = wanted.values.slice({.tokens = batch.keys(e)});
    return own;
}

template <Scalar T, DifferentiableAttention A>
ragged_bytes ragged_backward_bytes(const A& op, const ragged& batch, const inputs<T>& in, index_t concurrency) {
    return {
        batch, concurrency, [&](index_t e, index_t threads) {
            return operator_of_entry(op, batch, e).template backward_workspace_bytes<T>(shapes_of(inputs_of_entry(batch, in, e)), threads);
        }};
}

template <DifferentiableAttention A, Scalar T>
void check_ragged_backward(const A& op, const ragged& batch, const inputs<T>& in, const saved_outputs<T>& saved,
                           const output_gradients<T>& d_out, const gradients_of<A, T>& wanted) {
    check_ragged(op, batch, in);
    check_backward(op, in, saved, d_out, wanted);
    const auto check = [&](std::string_view argument, const tensor_view<T>& view, bool is_of_entries) {
        if (!view.data()) return;
        if (!is_of_entries)
            detail::raise(argument_error(A::name, argument, "of shape ", view.shape(), " is asked for, but what all sequences of a ragged ",
                                         "batch share has a gradient in a call for each of them only"));
        check_starts_apart(batch, output_memory(A::name, argument, view));
    };
    check("wanted.queries", wanted.queries, true);
    check("wanted.keys", wanted.keys, true);
    check("wanted.values", wanted.values, true);
    op.check_gradients(in, wanted, [&](std::string_view argument, const tensor_view<T>& view, const shape&) {
        check(argument, view, HasGradientsOfEntries<A, T>);
    });
}

} // namespace detail

/// Bytes of workspace that the gradient of a ragged call needs with such an executor or execution. Throws attention_error if the starts do
/// not fit.
template <DifferentiableAttention A, Scalar T>
std::size_t backward_workspace_bytes(const A& op, const ragged& batch, const inputs<T>& in, const detail::call_execution& run = {}) {
    detail::check_ragged(op, batch, in);
    return detail::ragged_backward_bytes<T>(op, batch, in, run.concurrency()).all;
}

/// The gradient of a call of an operator on a ragged batch, which says what shapes, positions and parameters are:
///     wanted.queries = d loss / d q,   wanted.keys = d loss / d k,   wanted.values = d loss / d v
/// and, of recurrent_attention, of what its rule takes of each token and of the first states, if they are given. Of each sequence the bits
/// are those of a call for it alone. Parameters that all sequences share, such as sinks, have no gradient here: it is the sum of those of
/// such calls. Long sequences are computed by all threads, one after the other, short ones one on each. `run` as in `attend`. Throws
/// attention_error, before anything is read or written, as backward does for any of the sequences.
template <DifferentiableAttention A, Scalar T>
void backward(const A& op, const ragged& batch, const inputs<T>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& d_out, const std::type_identity_t<gradients_of<A, T>>& wanted,
              const detail::call_execution& run = {}) {
    detail::check_ragged_backward<A, T>(op, batch, in, saved, d_out, wanted);
    const auto bytes = detail::ragged_backward_bytes<T>(op, batch, in, run.concurrency());
    run.reserve(A::name, "the gradient for q", in.queries.shape(), bytes.all);
    detail::for_each_entry(batch, bytes.of_a_thread, run, [&](index_t e, const execution& on) {
        const tensor_part queries{.tokens = batch.queries(e)};
        detail::operator_of_entry(op, batch, e)
            .backward(detail::inputs_of_entry(batch, in, e), saved.slice(queries), d_out.slice(queries),
                      detail::gradients_of_entry<A, T>(batch, wanted, e), on);
    });
}

} // namespace attn
