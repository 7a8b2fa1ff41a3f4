// Multi-head attention as a layer: projections to queries, keys and values, any attention operator, and the projection of its result.
#pragma once

#include "../attention/softmax_attention.hpp"
#include "../core/heads.hpp"
#include "../norm/identity_norm.hpp"
#include "linear.hpp"
#include "rotary.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Keys and values are made of the tokens as they are.
struct identity_reduction {};

/// Multi-head attention: linears around any operator.
/// For tokens x (batch, 1, n, c) and context y (batch, 1, m, c'), which is x if none is given:
///     Q = q(x) as (batch, heads, n, d_k),   K = k(y') as (batch, kv_heads, m, d_k),   V = v(y'') as (batch, kv_heads, m, d_v)
///     result = out(attention(Q, K, V)) (+ residual)
/// q, k, v, out: linears; d_k and d_v are what their outputs are over the heads, free of c. y' is y, or what a layer makes of it (`reduce`:
/// see spatial_reduction); y'' is y', or a context of its own for the values. Norms, if any, take each token and head of Q and K over its d_k
/// channels (Henry et al. 2020, "Query-Key Normalization for Transformers"); rotary positions, if any, turn them then. Projections write heads
/// side by side, as the attention reads and writes them: nothing is transposed or copied in between. Time: that of the projections and of the
/// operator. Memory: Q, K, V, the attention's result, and what the operator needs. Vaswani et al. 2017, "Attention Is All You Need".
template <Scalar T, Attention A = softmax_attention<>, class R = identity_reduction, Norm N = identity_norm<T>,
          class Arch = simd::native>
struct multi_head {
    using scalar = T;
    static constexpr std::string_view name = "multi_head";
    static constexpr bool in_place = true;
    static constexpr bool reduces = !std::same_as<R, identity_reduction>;

    index_t heads = 1;
    index_t kv_heads = heads; ///< divides heads, unless the attention says otherwise
    linear<T, Arch> q, k, v, out;
    A attention = {};
    const rotary<T>* rotation = nullptr; ///< of queries and keys, or none
    tensor_view<const index_t> token_positions = {};   ///< for the rotation: see rotary_positions; counted from the first if not given
    tensor_view<const index_t> context_positions = {}; ///< those of the keys, where they are other tokens
    R reduce = {};                       ///< a layer that tokens go through before k and v, or none
    N query_norm = {};                   ///< of each token and head of the queries, or none
    N key_norm = {};                     ///< the same of the keys

    void check(const layer_inputs<T>& in) const {
        if (heads < 1 || kv_heads < 1)
            throw argument_error(name, "heads",
                              "are " + std::to_string(heads) + " and " + std::to_string(kv_heads) + ": one at least is needed");
        detail::check_tokens(name, "tokens", in.tokens, q.inputs());
        const auto& source = source_of(in);
        if constexpr (reduces)
            reduce.check({source});
        else
            detail::check_tokens(name, in.context.data() ? "context" : "tokens", source, k.inputs());
        if (source.shape().batch != in.tokens.shape().batch)
            throw shape_error(name, "context",
                              "has shape " + to_string(source.shape()) + ", but tokens have " + to_string(in.tokens.shape()));
        if (in.value_context.data()) check_value_context(in);
        check_projection("q", q, q.inputs(), heads);
        check_projection("k", k, reduced(source.shape()).channels, kv_heads);
        check_projection("v", v, in.value_context.data() ? v.inputs() : reduced(source.shape()).channels, kv_heads);
        const auto s = shapes(in.tokens.shape(), source.shape());
        query_norm.check(s.queries);
        key_norm.check(s.keys);
        const auto planned = [](const shape& of) { return detail::planned(token_major(static_cast<const T*>(nullptr), of)); };
        attention.check(inputs<T>{planned(s.queries), planned(s.keys), planned(s.values), in.positions});
        out.check(name, "out", out.outputs(), attention.output_shape(s).heads * attention.output_shape(s).channels);
        if (rotation) {
            rotation->check(name, "q", s.queries, places(token_positions, in.positions.first_query));
            rotation->check(name, "k", s.keys, places(key_positions(in), in.positions.first_key));
        }
    }
    void check_apart(const output_memory& result) const {
        for (const auto* projection : {&q, &k, &v, &out}) projection->check_apart(result);
        attn::check_apart(attention, result);
        attn::check_apart(reduce, result);
        attn::check_apart(query_norm, result);
        attn::check_apart(key_norm, result);
        if (rotation) rotation->check_apart(result);
        result.require_apart("token_positions", token_positions);
        result.require_apart("context_positions", context_positions);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, tokens.tokens, out.outputs()}; }
    /// An empty context is none.
    std::size_t workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        detail::scratch memory;
        work(memory, *this, tokens, context.size() > 0 ? context : tokens, concurrency);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& result, const execution& run) const {
        const auto source = source_of(in);
        detail::scratch memory(run.workspace().bytes().data());
        const work w(memory, *this, in.tokens.shape(), source.shape(), run.concurrency());
        auto kept = source;
        if constexpr (reduces) {
            reduce.forward({source}, w.kept, run);
            kept = w.kept;
        }
        q.forward(in.tokens, {}, join_heads(w.queries), run);
        k.forward(kept, {}, join_heads(w.keys), run);
        v.forward(in.value_context.data() ? in.value_context : kept, {}, join_heads(w.values), run);
        query_norm.forward(w.queries, w.queries, run);
        key_norm.forward(w.keys, w.keys, run);
        if (rotation) {
            rotation->forward(w.queries, places(token_positions, in.positions.first_query), w.queries, run);
            rotation->forward(w.keys, places(key_positions(in), in.positions.first_key), w.keys, run);
        }
        attention.forward(inputs<T>{w.queries, w.keys, w.values, in.positions}, outputs<T>{w.attended}, run);
        out.forward(join_heads(w.attended), in.residual, result, run);
    }

private:
    static rotary_positions places(const tensor_view<const index_t>& given, const per_batch& first) {
        return given.data() ? rotary_positions(given) : rotary_positions(first);
    }
    const tensor_view<const index_t>& key_positions(const layer_inputs<T>& in) const {
        return in.context.data() || context_positions.data() ? context_positions : token_positions;
    }
    void check_value_context(const layer_inputs<T>& in) const {
        const auto &keys = in.context.shape(), &values = in.value_context.shape();
        if (reduces || !in.context.data())
            throw argument_error(name, "value_context",
                                 reduces ? "is given, but what is reduced is both keys and values" : "is given without a context, of the keys");
        detail::check_tokens(name, "value_context", in.value_context, v.inputs());
        if (values.batch != keys.batch || values.tokens != keys.tokens)
            throw shape_error(name, "value_context", "has shape " + to_string(values) + ", but the context has " + to_string(keys));
    }
    static tensor_view<const T> source_of(const layer_inputs<T>& in) { return in.context.data() ? in.context : in.tokens; }
    shape reduced(const shape& source) const {
        if constexpr (reduces)
            return reduce.output_shape(source);
        else
            return source;
    }
    static void check_projection(std::string_view argument, const linear<T, Arch>& l, index_t inputs, index_t heads) {
        l.check(name, argument, l.outputs(), inputs);
        if (l.outputs() % heads != 0)
            throw shape_error(name, argument,
                              "has a weight of shape " + to_string(l.weight.shape()) + ", whose outputs do not make " +
                                  std::to_string(heads) + " heads");
    }
    input_shapes shapes(const shape& tokens, const shape& source) const {
        const auto m = reduced(source).tokens;
        return {{tokens.batch, heads, tokens.tokens, q.outputs() / heads},
                {tokens.batch, kv_heads, m, k.outputs() / kv_heads},
                {tokens.batch, kv_heads, m, v.outputs() / kv_heads}};
    }

    /// The memory of a call, behind that of the layers and the operator inside.
    struct work {
        tensor_view<T> queries, keys, values, attended, kept;

        work(detail::scratch& memory, const multi_head& layer, const shape& tokens, const shape& source, index_t concurrency) {
            const auto s = layer.shapes(tokens, source);
            const auto of_out = layer.attention.output_shape(s), from = layer.reduced(source);
            const shape joined{of_out.batch, 1, of_out.tokens, of_out.heads * of_out.channels};
            std::size_t reducing = 0;
            if constexpr (reduces) reducing = layer.reduce.workspace_bytes(source, {}, concurrency);
            memory.take<std::byte>(static_cast<index_t>(
                std::max({reducing, layer.q.workspace_bytes(tokens, concurrency), layer.k.workspace_bytes(from, concurrency),
                          layer.v.workspace_bytes(from, concurrency), layer.query_norm.workspace_bytes(s.queries, concurrency),
                          layer.key_norm.workspace_bytes(s.keys, concurrency), layer.attention.template workspace_bytes<T>(s, concurrency),
                          layer.out.workspace_bytes(joined, concurrency)})));
            const auto take = [&](const shape& of) { return token_major(memory.take<T>(of.size()), of); };
            queries = take(s.queries);
            keys = take(s.keys);
            values = take(s.values);
            attended = take(of_out);
            if constexpr (reduces) kept = take(from);
        }
    };
};

} // namespace attn
