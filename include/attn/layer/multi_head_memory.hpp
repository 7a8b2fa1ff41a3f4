// The memory of a call of a multi_head, and of its gradient.
#pragma once

#include "../attention/attention.hpp"
#include "layer.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// The tensors of a call; or their gradients. Those of a call that is kept for its gradient are more.
template <class Layer>
struct multi_head_tensors {
    using T = typename Layer::scalar;

    tensor_view<T> queries, keys, values, attended, reduced;
    tensor_view<T> plain_queries, plain_keys; ///< before norms
    tensor_view<T> gates, gated;              ///< what `gate` makes, and what that makes of the attention's result
    tensor_view<T> log_sum_exp;
    std::byte* of_reduce = nullptr; ///< what `reduce` keeps

    /// Of a call that keeps none, behind so many bytes for what is inside.
    multi_head_tensors(scratch& memory, std::size_t inner, const Layer& layer, const shape& tokens, const shape& source)
        : multi_head_tensors((memory.take<std::byte>(inner), memory), layer, tokens, source, false) {}
    multi_head_tensors(scratch& memory, const Layer& layer, const shape& tokens, const shape& source, bool kept) {
        const auto s = layer.shapes(tokens, source);
        const auto take = [&](const shape& of) { return token_major(memory.take<T>(of.size()), of); };
        queries = plain_queries = take(s.queries);
        keys = plain_keys = Layer::shares_queries ? queries : take(s.keys);
        values = take(s.values);
        attended = gated = take(layer.attention.output_shape(s));
        if (layer.gated()) gates = take({tokens.batch, 1, tokens.tokens, layer.gate.outputs()});
        if constexpr (Layer::reduces) reduced = take(layer.reduced(source));
        if (Layer::normalises && (kept || decltype(layer.query_norm)::moves_statistics))
            plain_queries = take(s.queries), plain_keys = take(s.keys);
        if (!kept) return;
        if (layer.gated()) gated = take(attended.shape());
        if constexpr (decltype(layer.attention)::traits.has_log_sum_exp) log_sum_exp = take(log_sum_exp_shape(layer.attention, s));
        if constexpr (Layer::reduces && Layer::is_differentiable)
            of_reduce = memory.take<std::byte>(static_cast<index_t>(layer.reduce.kept_bytes(source, {})));
    }
};

/// The memory of a gradient, behind that of what is inside.
template <class Layer>
struct multi_head_gradient_work {
    tensor_view<typename Layer::scalar> of_source;
    multi_head_tensors<Layer> of;

    multi_head_gradient_work(scratch& memory, const Layer& layer, const shape& tokens, const shape& source, index_t concurrency)
        : of_source((memory.take<std::byte>(layer.template inner_bytes<true>(tokens, source, concurrency)),
                     head_major(Layer::reduces ? memory.take<typename Layer::scalar>(source.size()) : nullptr, source))),
          of(memory, layer, tokens, source, true) {}
};

} // namespace attn::detail
