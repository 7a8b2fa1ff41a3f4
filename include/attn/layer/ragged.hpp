// Layers on ragged batches.
#pragma once

#include "../attention/ragged.hpp"
#include "layer.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T>
layer_inputs<T> inputs_of_entry(const ragged& batch, const layer_inputs<T>& in, index_t e) {
    const auto part = [](const tensor_view<const T>& x, const row_range& tokens) {
        return is_given(x) ? x.slice({.tokens = tokens}) : tensor_view<const T>();
    };
    return {.tokens = part(in.tokens, batch.queries(e)),
            .residual = part(in.residual, batch.queries(e)),
            .context = part(in.context, batch.keys(e)),
            .value_context = part(in.value_context, batch.keys(e)),
            .positions = in.positions.of_entry(e)};
}

template <Layer L>
void check_ragged(const L& layer, const ragged& batch, const layer_inputs<typename L::scalar>& in) {
    check_starts(L::name, "starts", batch.starts, "tokens", in.tokens);
    if (is_given(in.residual)) check_starts(L::name, "starts", batch.starts, "residual", in.residual);
    if (is_given(in.context)) check_starts(L::name, "key_starts", batch.of_keys(), "context", in.context);
    if (is_given(in.value_context)) check_starts(L::name, "key_starts", batch.of_keys(), "value_context", in.value_context);
    check_counts(L::name, batch, in.positions);
    for (index_t e = 0; e < batch.entries(); ++e) {
        const auto part = inputs_of_entry(batch, in, e);
        layer.check(part);
        if (const auto to = layer.output_shape(part.tokens.shape()); to.tokens != part.tokens.shape().tokens)
            detail::raise(
                shape_error(L::name, "tokens", "of shape ", part.tokens.shape(), " become ", to, ": another number of them has no starts"));
    }
}

template <Layer L>
ragged_bytes ragged_bytes_of(const L& layer, const ragged& batch, const layer_inputs<typename L::scalar>& in, index_t concurrency) {
    return {batch, concurrency, [&](index_t e, index_t threads) {
                const auto part = inputs_of_entry(batch, in, e);
                return layer.workspace_bytes(part.tokens.shape(), part.context.shape(), threads);
            }};
}

} // namespace detail

/// Bytes of workspace that a ragged call of a layer needs with such an executor or execution. Throws attention_error if the starts do not
/// fit.
template <Layer L>
std::size_t workspace_bytes(const L& layer, const ragged& batch, const layer_inputs<typename L::scalar>& in,
                            const detail::call_execution& run = {}) {
    detail::check_ragged(layer, batch, in);
    return detail::ragged_bytes_of(layer, batch, in, run.concurrency()).all;
}

/// Runs a layer on each sequence of a ragged batch: tokens (1, 1, all tokens, channels), the same of the result, of a residual and, by
/// batch.key_starts, of a context. The bits are those of a call for each sequence, whose batch is 1. To train on several sequences in one
/// call, give softmax attention pattern::segments instead. Everything else as in `attend` with a ragged batch.
template <Layer L>
void forward(const L& layer, const ragged& batch, const layer_inputs<typename L::scalar>& in, const tensor_view<typename L::scalar>& out,
             const detail::call_execution& run = {}) {
    static_assert(
        !L::moves_statistics,
        "attn: a ragged batch is no step of training: norms in_training would take the statistics of one sequence after the other, "
        "from several threads");
    detail::check_ragged(layer, batch, in);
    detail::check_layer_output(layer, in, out, layer.output_shape(in.tokens.shape()));
    detail::check_starts_apart(batch, output_memory(L::name, "out", out));
    const auto bytes = detail::ragged_bytes_of(layer, batch, in, run.concurrency());
    run.reserve(L::name, "tokens", in.tokens.shape(), bytes.all);
    detail::for_each_entry(batch, bytes.of_a_thread, run, [&](index_t e, const execution& on) {
        layer.forward(detail::inputs_of_entry(batch, in, e), out.slice({.tokens = batch.queries(e)}), on);
    });
}

/// Runs a layer on a ragged batch, to a new tensor: see forward(layer, batch, in, out, run).
template <Layer L>
[[nodiscard]] tensor<typename L::scalar> forward(const L& layer, const ragged& batch, const layer_inputs<typename L::scalar>& in,
                                                 const detail::call_execution& run = {}) {
    detail::check_ragged(layer, batch, in);
    tensor<typename L::scalar> out(layer.output_shape(in.tokens.shape()));
    forward(layer, batch, in, out.view(), run);
    return out;
}

} // namespace attn
