// Multi-head attention as a layer: projections to queries, keys and values, any attention operator, and the projection of its result.
#pragma once

#include "../attention/softmax_backward.hpp"
#include "../core/heads.hpp"
#include "linear.hpp"
#include "multi_head_checks.hpp"
#include "multi_head_memory.hpp"
#include "output_gate.hpp"
#include "rotary.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// What attention with a cache or a state is: defined in cached.hpp, which includes them.
template <class A, class Cache>
struct cached_attention;

/// The gradients of an attention operator; of one that has no gradient, none.
template <class A, Scalar T>
no_gradients gradients_of_operator();
template <DifferentiableAttention A, Scalar T>
gradients_of<A, T> gradients_of_operator();

} // namespace detail

/// Keys and values are made of the tokens as they are.
struct identity_reduction {
    static constexpr bool moves_statistics = false;
};

/// Multi-head attention: linears around any operator.
/// For tokens x (batch, 1, n, c) and context y (batch, 1, m, c'), which is x if none is given:
///     Q = q(x) as (batch, heads, n, d_k),   K = k(y') as (batch, kv_heads, m, d_k),   V = v(y'') as (batch, kv_heads, m, d_v)
///     result = out(attention(Q, K, V)) (+ residual),      with a gate   out(attention(Q, K, V) * sigmoid(gate(x))) (+ residual)
/// q, k, v, out: linears; d_k and d_v are what their outputs are over the heads, free of c. y' is y, or what a layer makes of it (`reduce`:
/// see spatial_reduction); y'' is y', or a context of its own for the values. Norms, if any, take each token and head of Q and K over its
/// d_k channels (Henry et al. 2020, "Query-Key Normalization for Transformers"); rotary positions, if any, turn them then. A gate has
/// an output for each number of a token's result, or for each head, whose channels share it (Qiu et al. 2025, "Gated Attention for Large
/// Language Models"). An operator whose keys are its queries, as the Reformer's (lsh_attention), takes Q for K: then k stays empty, heads
/// are kv_heads, and there is no context, no `reduce` and no norm; anything else is refused. Projections write heads side by side, as the
/// attention reads and writes them: nothing is transposed or copied in between. Time: that of the projections and of the operator. Memory:
/// Q, K, V, the attention's result, the gates, and what the operator needs. Vaswani et al. 2017, "Attention Is All You Need".
template <Scalar T, Attention A = softmax_attention<>, class R = identity_reduction, Norm N = identity_norm<T>>
struct multi_head {
    using scalar = T;
    static constexpr std::string_view name = "multi_head";
    static constexpr bool in_place = true;
    static constexpr bool reduces = !std::same_as<R, identity_reduction>;
    static constexpr bool moves_statistics = N::moves_statistics || R::moves_statistics;
    static constexpr bool shares_queries = A::traits.keys_are_queries; ///< K is Q
    static_assert(!shares_queries || (!reduces && std::same_as<N, identity_norm<T>>),
                  "attn: keys that are queries are neither reduced nor normalised by themselves");
    /// Whether all that is inside has a gradient.
    static constexpr bool is_differentiable =
        DifferentiableAttention<A> && (!reduces || DifferentiableLayer<R>) && detail::TrainableNorm<N>;

    index_t heads = 1;
    index_t kv_heads = heads; ///< divides heads, unless the attention says otherwise
    linear<T> q;
    linear<T> k = {}; ///< none where keys are queries
    linear<T> v, out;
    A attention = {};
    const rotary<T>* rotation = nullptr;               ///< of queries and keys, or none
    tensor_view<const index_t> token_positions = {};   ///< for the rotation: see rotary_positions; counted from the first if not given
    tensor_view<const index_t> context_positions = {}; ///< those of the keys, where they are other tokens
    R reduce = {};                                     ///< a layer that tokens go through before k and v, or none
    N query_norm = {};                                 ///< of each token and head of the queries, or none
    N key_norm = {};                                   ///< the same of the keys
    linear<T> gate = {};                               ///< of the tokens, or none: a logit for each number of the result, or head

    /// Whether there is a gate.
    bool gated() const { return detail::is_given(gate.weight); }

    void check(const layer_inputs<T>& in) const {
        if (heads < 1 || kv_heads < 1)
            detail::raise(argument_error(name, "heads", "are ", heads, " and ", kv_heads, ": one at least is needed"));
        detail::check_tokens(name, "tokens", in.tokens, q.inputs());
        const auto& source = source_of(in);
        if constexpr (shares_queries) detail::check_shared_keys(name, A::name, k, heads, kv_heads, in);
        else if constexpr (reduces) reduce.check({source});
        else detail::check_tokens(name, detail::is_given(in.context) ? "context" : "tokens", source, k.inputs());
        if (source.shape().batch != in.tokens.shape().batch)
            detail::raise(shape_error(name, "context", "has shape ", source.shape(), ", but tokens have ", in.tokens.shape()));
        if (detail::is_given(in.value_context)) detail::check_value_context(name, in, v.inputs(), reduces);
        detail::check_heads(name, "q", q, q.inputs(), heads);
        if constexpr (!shares_queries) {
            detail::check_heads(name, "k", k, reduced(source.shape()).channels, kv_heads);
            detail::check_key_channels(name, q.outputs(), heads, k.outputs(), kv_heads);
        }
        detail::check_heads(name, "v", v, detail::is_given(in.value_context) ? v.inputs() : reduced(source.shape()).channels, kv_heads);
        const auto s = shapes(in.tokens.shape(), source.shape());
        query_norm.check(s.queries);
        key_norm.check(s.keys);
        attention.check(planned(s, in.positions));
        const auto attended = attention.output_shape(s);
        out.check(name, "out", out.outputs(), attended.heads * attended.channels);
        if (gated()) detail::output_gate<T>::check(name, gate, q.inputs(), attended);
        if (rotation) {
            rotation->check(name, "q", s.queries, places(token_positions, in.positions.first_query));
            rotation->check(name, "k", s.keys, places(key_positions(in), in.positions.first_key));
        }
    }
    void check_apart(const output_memory& result) const {
        for (const auto* projection : {&q, &k, &v, &out, &gate}) projection->check_apart(result);
        attention.check_apart(result);
        if constexpr (reduces) reduce.check_apart(result);
        query_norm.check_apart(result);
        key_norm.check_apart(result);
        if (rotation) rotation->check_apart(result);
        result.require_apart("token_positions", token_positions);
        result.require_apart("context_positions", context_positions);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, tokens.tokens, out.outputs()}; }
    /// Bytes of workspace that the layer needs. An empty context is none.
    std::size_t workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        const auto& source = context.size() > 0 ? context : tokens;
        return detail::bytes_for<tensors>(inner_bytes<false>(tokens, source, concurrency), *this, tokens, source);
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& result, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const auto tokens = in.tokens.shape(), source = source_of(in).shape();
        compute(in, {memory, inner_bytes<false>(tokens, source, run.concurrency()), *this, tokens, source}, result, run);
    }

    // On the next tokens of a sequence, beside a cache of its keys and values, or of a context's, or a state: see cached.hpp.
    void check_cached(const layer_inputs<T>& in, const auto& cache) const {
        static_assert(!reduces && !shares_queries, "attn: keys that are reduced, or queries, are not kept in a cache");
        const auto& context = in.context.shape();
        if (!detail::is_given(in.context) && in.positions.given())
            detail::raise(argument_error(name, "positions", "are given, but a cache has those of the tokens"));
        with<decltype(cache)>::check_layer(name, in, rotation != nullptr, cache);
        check(detail::is_given(in.context) ? in : beside(in, cache));
        if (detail::is_given(in.context) && in.positions.first_key[0] != 0)
            detail::raise(
                argument_error(name, "positions.first_key", "is ", in.positions.first_key[0], ", but the keys of a cache begin at 0"));
        if (detail::is_given(in.context) && cache.size() > 0 && cache.size() != context.tokens)
            detail::raise(shape_error(name, "context", "has shape ", context, ", but the cache has ", cache.size(), " tokens of another"));
        const auto own = beside(in, cache);
        with<decltype(cache)>::check(attention, planned(shapes(own.tokens.shape(), source_of(own).shape()), own.positions), cache);
    }
    std::size_t cached_workspace_bytes(const shape& tokens, const shape& context, const auto& cache, index_t concurrency) const {
        auto source = context.size() > 0 ? context : tokens;
        if (context.size() > 0 && cache.size() > 0) source.tokens = 0;
        return detail::bytes_for<tensors>(cached_inner_bytes(tokens, source, cache, concurrency), *this, tokens, source);
    }
    void forward_cached(const layer_inputs<T>& in, auto& cache, const tensor_view<T>& result, const execution& run) const {
        const auto own = beside(in, cache);
        const auto tokens = own.tokens.shape(), source = source_of(own).shape();
        detail::scratch memory(run.workspace().bytes().data());
        const tensors t(memory, cached_inner_bytes(tokens, source, cache, run.concurrency()), *this, tokens, source);
        compute(own, t, result, run,
                [&] { with<decltype(cache)>::run(attention, {t.queries, t.keys, t.values, own.positions}, cache, t.attended, run); });
    }

    /// The gradients of all parts' parameters; of the attention's, the queries, keys and values are left empty, and of the norms' the x.
    struct gradients {
        typename linear<T>::gradients q = {};                           ///< of q
        typename linear<T>::gradients k = {};                           ///< of k
        typename linear<T>::gradients v = {};                           ///< of v
        typename linear<T>::gradients out = {};                         ///< of out
        typename linear<T>::gradients gate = {};                        ///< of gate
        decltype(detail::gradients_of_operator<A, T>()) attention = {}; ///< of the attention's parameters
        detail::parameter_gradients<R> reduce = {};                     ///< of reduce
        detail::parameter_gradients<N> query_norm = {};                 ///< of query_norm
        detail::parameter_gradients<N> key_norm = {};                   ///< of key_norm
    };
    void for_each_gradient(const layer_inputs<T>& in, const gradients& wanted, const auto& visit) const {
        q.for_each_gradient(in, wanted.q, detail::visit_member("q", visit));
        k.for_each_gradient(in, wanted.k, detail::visit_member("k", visit));
        v.for_each_gradient(in, wanted.v, detail::visit_member("v", visit));
        out.for_each_gradient(in, wanted.out, detail::visit_member("out", visit));
        gate.for_each_gradient(in, wanted.gate, detail::visit_member("gate", visit));
        const auto s = shapes(in.tokens.shape(), source_of(in).shape());
        if constexpr (DifferentiableAttention<A>)
            attention.check_gradients(planned(s, in.positions), wanted.attention,
                                      [&](std::string_view argument, const auto& view, const shape& expected) {
                                          visit(detail::nested_name("attention", argument), view, expected, false);
                                      });
        if constexpr (reduces) reduce.for_each_gradient({source_of(in)}, wanted.reduce, detail::visit_member("reduce", visit));
        detail::for_each_norm_gradient<N>(wanted.query_norm, s.queries.channels, detail::visit_member("query_norm", visit));
        detail::for_each_norm_gradient<N>(wanted.key_norm, s.keys.channels, detail::visit_member("key_norm", visit));
    }
    /// Q, K, V, the attention's result, and what is before norms and after reduce.
    std::size_t kept_bytes(const shape& tokens, const shape& context) const {
        return detail::bytes_for<tensors>(*this, tokens, context.size() > 0 ? context : tokens, true);
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& result, std::byte* kept, const execution& run) const {
        detail::scratch memory(kept);
        compute(in, {memory, *this, in.tokens.shape(), source_of(in).shape(), true}, result, run);
    }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        return detail::bytes_for<gradient_work>(*this, tokens, context.size() > 0 ? context : tokens, concurrency);
    }
    void backward(const layer_inputs<T>& in, const std::byte* kept, const tensor_view<const T>& d_out,
                  const layer_gradients<multi_head>& wanted, const execution& run) const
        requires is_differentiable
    {
        const auto source = source_of(in);
        detail::scratch memory(run.workspace().bytes().data()), held(const_cast<std::byte*>(kept));
        const tensors t(held, *this, in.tokens.shape(), source.shape(), true);
        const gradient_work g(memory, *this, in.tokens.shape(), source.shape(), run.concurrency());
        const auto& p = wanted.parameters;

        out.backward(join_heads(t.gated), d_out, join_heads(g.of.gated), false, p.out, run);
        if (gated()) detail::output_gate<T>(t.gates, t.attended, run).backward(g.of.gated, g.of.attended, g.of.gates);
        auto of_attention = p.attention;
        of_attention.queries = g.of.queries;
        if constexpr (!shares_queries) of_attention.keys = g.of.keys;
        of_attention.values = g.of.values;
        attention.backward(inputs<T>{t.queries, t.keys, t.values, in.positions}, {t.attended, t.log_sum_exp}, {g.of.attended}, of_attention,
                           run);
        rotate(in, g.of, [&](const auto& x, const rotary_positions& where) { rotation->backward(x, where, x, run); });
        if constexpr (normalises) {
            detail::backward_inside(query_norm, p.query_norm, t.plain_queries, g.of.queries, g.of.plain_queries, run);
            detail::backward_inside(key_norm, p.key_norm, t.plain_keys, g.of.keys, g.of.plain_keys, run);
        }

        // What several projections read has the sum of what they give.
        q.backward(in.tokens, join_heads(g.of.plain_queries), wanted.tokens, false, p.q, run);
        if (gated()) gate.backward(in.tokens, g.of.gates, wanted.tokens, true, p.gate, run);
        const bool is_tokens = !detail::is_given(in.context);
        const auto of_source = is_tokens ? wanted.tokens : wanted.context;
        const auto read = reduces ? tensor_view<const T>(t.reduced) : source;
        const auto of_read = reduces ? g.of.reduced : of_source;
        if constexpr (!shares_queries) k.backward(read, join_heads(g.of.plain_keys), of_read, is_tokens && !reduces, p.k, run);
        if (detail::is_given(in.value_context))
            v.backward(in.value_context, join_heads(g.of.values), wanted.value_context, false, p.v, run);
        else v.backward(read, join_heads(g.of.values), of_read, true, p.v, run);
        if constexpr (reduces) {
            const auto to = is_tokens && of_source.data() ? g.of_source : of_source;
            reduce.backward({source}, t.of_reduce, g.of.reduced, {.tokens = to, .parameters = p.reduce}, run);
            if (is_tokens && of_source.data())
                detail::for_each_row(of_source, run, [&](T* row, index_t b, index_t i) {
                    detail::add_rows(row, to.row(b, 0, i), row, to.shape().channels);
                });
        }
    }

private:
    using tensors = detail::multi_head_tensors<multi_head>;
    using gradient_work = detail::multi_head_gradient_work<multi_head>;
    friend tensors;
    friend gradient_work;
    template <class Cache>
    using with = detail::cached_attention<A, std::remove_cvref_t<Cache>>;
    /// What is new beside a cache: tokens, at the positions after those in it; of a context that it has, nothing.
    static layer_inputs<T> beside(const layer_inputs<T>& in, const auto& cache) {
        auto next = in;
        if (!detail::is_given(in.context)) next.positions = {.first_query = cache.size(), .first_key = cache.size()};
        else if (cache.size() > 0)
            for (auto* kept : {&next.context, &next.value_context}) *kept = kept->slice({.tokens = {}});
        return next;
    }
    std::size_t cached_inner_bytes(const shape& tokens, const shape& source, const auto& cache, index_t concurrency) const {
        return std::max(inner_bytes<false>(tokens, source, concurrency),
                        with<decltype(cache)>::workspace_bytes(attention, shapes(tokens, source), cache, concurrency));
    }

    static constexpr bool normalises = !std::same_as<N, identity_norm<T>>;

    static rotary_positions places(const tensor_view<const index_t>& of_tokens, const per_batch& first) {
        return detail::is_given(of_tokens) ? rotary_positions(of_tokens) : rotary_positions(first);
    }
    const tensor_view<const index_t>& key_positions(const layer_inputs<T>& in) const {
        return detail::is_given(in.context) || detail::is_given(context_positions) ? context_positions : token_positions;
    }
    /// Calls turn(x, positions) for queries and keys, if there is a rotation; keys that are queries are turned once.
    void rotate(const layer_inputs<T>& in, const auto& t, const auto& turn) const {
        if (!rotation) return;
        turn(t.queries, places(token_positions, in.positions.first_query));
        if (!shares_queries) turn(t.keys, places(key_positions(in), in.positions.first_key));
    }
    static tensor_view<const T> source_of(const layer_inputs<T>& in) { return detail::is_given(in.context) ? in.context : in.tokens; }
    shape reduced(const shape& source) const {
        if constexpr (reduces) return reduce.output_shape(source);
        else return source;
    }
    input_shapes shapes(const shape& tokens, const shape& source) const {
        const auto m = reduced(source).tokens;
        return {{tokens.batch, heads, tokens.tokens, q.outputs() / heads},
                {tokens.batch, kv_heads, m, shares_queries ? q.outputs() / heads : k.outputs() / kv_heads},
                {tokens.batch, kv_heads, m, v.outputs() / kv_heads}};
    }

    static inputs<T> planned(const input_shapes& s, const positions& where) {
        const auto view = [](const shape& of) { return detail::planned(token_major(static_cast<const T*>(nullptr), of)); };
        return {view(s.queries), view(s.keys), view(s.values), where};
    }

    shape joined(const input_shapes& s) const {
        const auto of_out = attention.output_shape(s);
        return {of_out.batch, 1, of_out.tokens, of_out.heads * of_out.channels};
    }
    /// What the layers and the operator inside need, one after the other.
    template <bool backward>
    std::size_t inner_bytes(const shape& tokens, const shape& source, index_t concurrency) const {
        const auto s = shapes(tokens, source);
        const auto from = reduced(source);
        const auto of = [&](const auto& inner, const shape& x) { return detail::inner_bytes<backward>(inner, x, {}, concurrency); };
        auto most = std::max({of(q, tokens), of(k, from), of(v, from), of(query_norm, s.queries), of(key_norm, s.keys), of(out, joined(s)),
                              of(gate, tokens)});
        if constexpr (reduces) most = std::max(most, of(reduce, source));
        if constexpr (backward) return std::max(most, attention.template backward_workspace_bytes<T>(s, concurrency));
        else return std::max(most, attention.template workspace_bytes<T>(s, concurrency));
    }
    void compute(const layer_inputs<T>& in, const tensors& t, const tensor_view<T>& result, const execution& run) const {
        compute(in, t, result, run, [&] {
            attention.forward(inputs<T>{t.queries, t.keys, t.values, in.positions}, outputs<T>{t.attended, t.log_sum_exp}, run);
        });
    }
    /// attends: computes t.attended from queries, keys and values.
    void compute(const layer_inputs<T>& in, const tensors& t, const tensor_view<T>& result, const execution& run,
                 const auto& attends) const {
        auto source = source_of(in);
        if constexpr (reduces) {
            detail::forward_inside(reduce, {source}, t.reduced, t.of_reduce, run);
            source = t.reduced;
        }
        q.forward({in.tokens}, join_heads(t.plain_queries), run);
        if constexpr (!shares_queries) k.forward({source}, join_heads(t.plain_keys), run);
        v.forward({detail::is_given(in.value_context) ? in.value_context : source}, join_heads(t.values), run);
        query_norm.forward(t.plain_queries, t.queries, run);
        if constexpr (!shares_queries) key_norm.forward(t.plain_keys, t.keys, run);
        rotate(in, t, [&](const auto& x, const rotary_positions& where) { rotation->forward(x, where, x, run); });
        attends();
        if (gated()) {
            gate.forward({in.tokens}, t.gates, run);
            detail::output_gate<T>(t.gates, t.attended, run).forward(t.gated);
        }
        out.forward({.tokens = join_heads(t.gated), .residual = in.residual}, result, run);
    }
};

} // namespace attn
