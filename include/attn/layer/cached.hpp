// Layers on the next tokens of a sequence, beside what is kept of those before: a cache of keys and values, or a state.
#pragma once

#include "../cache/attend.hpp"
#include "../cache/linear_state.hpp"
#include "../cache/recurrent_state.hpp"
#include "transformer_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T>
void check_one_sequence(std::string_view layer, const layer_inputs<T>& in) {
    if (in.tokens.shape().batch != 1)
        raise(shape_error(layer, "tokens", "has shape ", in.tokens.shape(), ", but a cache is of one sequence"));
}

/// Attention of a layer with what keeps the tokens before.
/// - `check_layer(layer, in, rotates, cache)`: throws attention_error if the layer's inputs do not go with a cache of this kind.
/// - `check(attention, in, cache)`: throws attention_error if the cache cannot take such tokens, which the operator has checked.
/// - `workspace_bytes(attention, shapes, cache, concurrency)`: of `run`.
/// - `run(attention, in, cache, out, run)`: appends keys and values, and attends.
template <class A, class Cache>
struct cached_attention {
    static_assert(std::same_as<A, void>, "attn: this operator has no recurrent_state: recurrent_attention has one");
};

template <class A, Scalar T>
struct cached_attention<A, sequence<T>> {
    static void check_layer(std::string_view layer, const layer_inputs<T>& in, bool rotates, const sequence<T>& cache) {
        check_one_sequence(layer, in);
        if (rotates && cache.turns_from(0).turn_rows())
            raise(argument_error(layer, "rotation", "is given, but the cache turns queries and keys itself"));
    }
    static void check(const A&, const inputs<T>& in, const sequence<T>& cache) { cache.check_append(in.keys.shape(), in.values.shape()); }
    static std::size_t workspace_bytes(const A& attention, const input_shapes& s, const sequence<T>& cache, index_t concurrency) {
        const auto q = planned(head_major(static_cast<const T*>(nullptr), s.queries));
        return kept_call<A, sequence<T>>(attention, q, 0, cache, {}).workspace_bytes(concurrency);
    }
    static void run(const A& attention, const inputs<T>& in, sequence<T>& cache, const tensor_view<T>& out, const execution& run) {
        cache.append(in.keys, in.values);
        const kept_call<A, sequence<T>> call(attention, in.queries, in.positions.first_query[0], cache, outputs<T>{out});
        call.check_any();
        call.run(run);
    }
};

template <class A, Scalar T>
struct cached_attention<A, linear_state<T>> {
    static void check_layer(std::string_view layer, const layer_inputs<T>& in, bool, const linear_state<T>&) {
        check_one_sequence(layer, in);
        check_no_context(layer, in, "is given, but a state is of the tokens themselves");
    }
    static void check(const A& attention, const inputs<T>& in, const linear_state<T>& state) {
        state.check_append(in.keys.shape(), in.values.shape());
        kept_call<A, linear_state<T>>(attention, in.queries, state, {}).check_operator(state.size() + in.keys.shape().tokens);
    }
    static std::size_t workspace_bytes(const A& attention, const input_shapes& s, const linear_state<T>& state, index_t concurrency) {
        const kept_call<A, linear_state<T>> call(attention, planned(head_major(static_cast<const T*>(nullptr), s.queries)), state, {});
        return std::max(call.append_bytes(concurrency), call.workspace_bytes(state.size() + s.keys.tokens, concurrency));
    }
    static void run(const A& attention, const inputs<T>& in, linear_state<T>& state, const tensor_view<T>& out, const execution& run) {
        state.append(in.keys, in.values, run);
        kept_call<A, linear_state<T>>(attention, in.queries, state, outputs<T>{out}).run(run);
    }
};

template <class Rule, Scalar T>
struct cached_attention<recurrent_attention<Rule>, recurrent_state<T>> {
    using call = recurrent_call<Rule, T>;

    static void check_layer(std::string_view layer, const layer_inputs<T>& in, bool, const recurrent_state<T>& state) {
        check_no_context(layer, in, "is given, but a state is of the tokens themselves");
        state.check_whole();
    }
    static void check(const recurrent_attention<Rule>& attention, const inputs<T>& in, const recurrent_state<T>& state) {
        call(attention, in).check(state);
    }
    static std::size_t workspace_bytes(const recurrent_attention<Rule>& attention, const input_shapes& s, const recurrent_state<T>&,
                                       index_t concurrency) {
        return call::workspace_bytes(attention, s, concurrency);
    }
    static void run(const recurrent_attention<Rule>& attention, const inputs<T>& in, recurrent_state<T>& state, const tensor_view<T>& out,
                    const execution& run) {
        call(attention, in).run(state, outputs<T>{out}, run);
    }
};

template <class C, class T>
concept KeepsTokens = std::same_as<C, sequence<T>> || std::same_as<C, linear_state<T>> || std::same_as<C, recurrent_state<T>>;

} // namespace detail

/// A layer that can keep what it needs of the tokens before: a multi_head, or a transformer_block of one. Softmax, sparse and pointwise
/// attention keep keys and values in a sequence, causal linear and simplified linear attention a linear_state, and recurrent attention a
/// recurrent_state.
/// - `check_cached(in, cache)`: throws attention_error if shapes do not fit, or the cache has no room for the tokens, or the context.
/// - `cached_workspace_bytes(tokens, context, cache, concurrency)`: the scratch memory that `forward_cached` needs.
/// - `forward_cached(in, cache, out, run)`: as `forward`, for tokens that come next; their keys and values go to the cache, or once those
///   of the context.
template <class L, class Cache = sequence<typename L::scalar>>
concept CachedLayer = Layer<L> && detail::KeepsTokens<Cache, typename L::scalar> &&
                      requires(const L& layer, Cache& cache, const layer_inputs<typename L::scalar>& in,
                               const tensor_view<typename L::scalar>& out, const shape& s, const execution& run) {
                          layer.check_cached(in, cache);
                          { layer.cached_workspace_bytes(s, s, cache, index_t{1}) } -> std::same_as<std::size_t>;
                          layer.forward_cached(in, cache, out, run);
                      };

/// Bytes of workspace that a layer needs for so many tokens with a cache: see forward(layer, cache, in, out, run).
template <class L, class Cache>
    requires CachedLayer<L, Cache>
std::size_t workspace_bytes(const L& layer, const Cache& cache, const layer_inputs<typename L::scalar>& in,
                            const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    return layer.cached_workspace_bytes(in.tokens.shape(), in.context.shape(), cache, run.concurrency());
}

/// Runs a layer on the next tokens of a sequence, one or a chunk, (1, 1, n, channels): the cache, one for each layer, takes them, and the
/// queries see all that is in it. It is a sequence, to which keys and values are appended, a linear_state, made of the attention's operator
/// and kv heads, or a recurrent_state, which may be of a batch of sequences, (batch, 1, n, channels); what a recurrent rule takes of each
/// token are numbers of these n, with which the layer is made anew for each call. Positions, of a rotation too, are those of the tokens in
/// the cache. The bits are those of a call on all tokens, however they are cut (with a cache that is not quantised).
/// With a context, (1, 1, m, channels), a sequence has its keys and values: the first call appends them, later ones read them, and of the
/// context no more than its shape; another one wants another cache. Positions are given as without a cache, the first key's 0.
/// `run` as in attend. Throws attention_error, before anything is written, if shapes do not fit, the cache is of another operator, or its
/// pool has too few pages. Whatever is thrown, a sequence or a linear_state has the tokens that it had; a recurrent_state has that after an
/// attention_error, and after what an executor throws it may have taken these too, or be lost.
template <class L, class Cache>
    requires CachedLayer<L, Cache>
void forward(const L& layer, Cache& cache, const layer_inputs<typename L::scalar>& in,
             const std::type_identity_t<tensor_view<typename L::scalar>>& out, const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    detail::check_layer_output(layer, in, out, layer.output_shape(in.tokens.shape()));
    run.reserve(L::name, "tokens", in.tokens.shape(),
                layer.cached_workspace_bytes(in.tokens.shape(), in.context.shape(), cache, run.concurrency()));
    const auto before = cache.size();
    detail::try_catch([&] { layer.forward_cached(in, cache, out, run); },
                      [&] {
                          if constexpr (requires { cache.truncate(before); }) cache.truncate(before);
                          detail::throw_again();
                      });
}

/// Runs a layer on the next tokens of a sequence, to a new tensor: see forward(layer, cache, in, out, run).
template <class L, class Cache>
    requires CachedLayer<L, Cache>
[[nodiscard]] tensor<typename L::scalar> forward(const L& layer, Cache& cache, const layer_inputs<typename L::scalar>& in,
                                                 const detail::call_execution& run = {}) {
    layer.check_cached(in, cache);
    tensor<typename L::scalar> out(layer.output_shape(in.tokens.shape()));
    forward(layer, cache, in, out.view(), run);
    return out;
}

} // namespace attn
