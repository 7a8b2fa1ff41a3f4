// Layers on the next tokens of a sequence, whose keys and values a cache keeps.
#pragma once

#include "../cache/attend.hpp"
#include "transformer_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <class A, Scalar T>
std::size_t cached_attention_bytes(const A& attention, const shape& queries, const sequence<T>& cache, index_t concurrency) {
    const auto q = planned(head_major(static_cast<const T*>(nullptr), queries));
    return sequence_call<A, T>(attention, q, 0, cache, {}).workspace_bytes(concurrency);
}
template <class A, Scalar T>
void append_and_attend(const A& attention, const inputs<T>& in, sequence<T>& cache, const tensor_view<T>& out, const execution& run) {
    const auto before = cache.size();
    cache.append(in.keys, in.values);
    const auto attend_to_all = [&] {
        const sequence_call<A, T> call(attention, in.queries, in.positions.first_query[0], cache, outputs<T>{out});
        call.check();
        call.run(run);
    };
    try_catch(attend_to_all, [&] {
        cache.truncate(before);
        throw_again();
    });
}

} // namespace detail

/// A layer that can keep keys and values in a cache: a multi_head of softmax, sparse or pointwise attention, or a transformer_block of one.
/// - `check_cached(in, cache)`: throws attention_error if shapes do not fit, or the cache has no room for the tokens, or the context.
/// - `cached_workspace_bytes(tokens, context, cache, concurrency)`: the scratch memory that `forward_cached` needs.
/// - `forward_cached(in, cache, out, run)`: as `forward`, for tokens that come next; their keys and values go to the cache, or once those
///   of the context.
template <class L>
concept CachedLayer = Layer<L> && requires(const L& layer, sequence<typename L::scalar>& cache, const layer_inputs<typename L::scalar>& in,
                                           const tensor_view<typename L::scalar>& out, const shape& s, const execution& run) {
    layer.check_cached(in, cache);
    { layer.cached_workspace_bytes(s, s, cache, index_t{1}) } -> std::same_as<std::size_t>;
    layer.forward_cached(in, cache, out, run);
};

/// Bytes of workspace that a layer needs for so many tokens with a cache: see forward(layer, cache, in, out, run).
template <CachedLayer L>
std::size_t workspace_bytes(const L& layer, const sequence<typename L::scalar>& cache, const layer_inputs<typename L::scalar>& in,
                            const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    return layer.cached_workspace_bytes(in.tokens.shape(), in.context.shape(), cache, run.concurrency());
}

/// Runs a layer on the next tokens of a sequence, one or a chunk, (1, 1, n, channels): their keys and values are appended to the cache, one
/// for each layer, and the queries see all that is in it. Positions, of a rotation too, are those of the tokens in the cache. The bits are
/// those of a call on all tokens, however they are cut (with a cache that is not quantised).
/// With a context, (1, 1, m, channels), the cache has its keys and values: the first call appends them, later ones read them, and of the
/// context no more than its shape; another one wants another cache. Positions are given as without a cache, the first key's 0.
/// `run` as in attend. Throws attention_error, before anything is written, if shapes do not fit, or the cache's pool has too few pages;
/// then the cache is as it was.
template <CachedLayer L>
void forward(const L& layer, sequence<typename L::scalar>& cache, const layer_inputs<typename L::scalar>& in,
             const std::type_identity_t<tensor_view<typename L::scalar>>& out, const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    detail::check_layer_output(layer, in, out, layer.output_shape(in.tokens.shape()));
    run.reserve(L::name, "tokens", in.tokens.shape(),
                layer.cached_workspace_bytes(in.tokens.shape(), in.context.shape(), cache, run.concurrency()));
    layer.forward_cached(in, cache, out, run);
}

/// Runs a layer on the next tokens of a sequence, to a new tensor: see forward(layer, cache, in, out, run).
template <CachedLayer L>
[[nodiscard]] tensor<typename L::scalar> forward(const L& layer, sequence<typename L::scalar>& cache,
                                                 const layer_inputs<typename L::scalar>& in, const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    tensor<typename L::scalar> out(layer.output_shape(in.tokens.shape()));
    forward(layer, cache, in, out.view(), run);
    return out;
}

} // namespace attn
