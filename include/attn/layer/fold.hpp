// A transformer block without its norms: they go into the linears behind them.
#pragma once

#include "parameters.hpp"
#include "transformer_block.hpp"
#include "windowed.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// New parameters of the sizes of a linear's, of that name.
template <Scalar T>
linear_view<T> new_linear(parameters& to, const std::string& name, const linear<T>& like) {
    const auto weight = to.add<T>(name + ".weight", {like.outputs(), like.inputs()}), bias = to.add<T>(name + ".bias", {like.outputs()});
    return {weight, std::span<T>(bias.data(), static_cast<std::size_t>(like.outputs()))};
}

} // namespace detail

/// The layer that equals `norm` and then `layer`, for norms over tokens with running statistics (batch_norm, rep_batch_norm,
/// progressive_rep_batch_norm). The linears that read its tokens get new weights and biases, in `folded`, called `name`.q.weight,
/// `name`.up.bias, ...; the others stay. Keys and values must come of the tokens, not of a context. Throws attention_error if norm and
/// layer do not fit or the norm has no statistics; parameter_error if a name is taken.
template <FoldableNorm N, Scalar T>
linear<T> fold_into(const N& norm, const linear<T>& layer, parameters& folded, const std::string& name) {
    const auto own = detail::new_linear(folded, name, layer);
    fold(norm, layer.view(), own);
    return {own.weight, own.bias, layer.products};
}
/// The feed_forward that equals `norm` and then `layer`: `up` is folded, and `gate` if there is one. Throws as for a linear.
template <FoldableNorm N, Scalar T, class F>
feed_forward<T, F> fold_into(const N& norm, feed_forward<T, F> layer, parameters& folded, const std::string& name) {
    layer.up = fold_into(norm, layer.up, folded, name + ".up");
    if (layer.gated()) layer.gate = fold_into(norm, layer.gate, folded, name + ".gate");
    return layer;
}
/// The spatial_reduction that equals `norm` and then `layer`, whose linear reads the tokens of a window side by side.
template <FoldableNorm N, Scalar T, Norm Own>
spatial_reduction<T, Own> fold_into(const N& norm, spatial_reduction<T, Own> layer, parameters& folded, const std::string& name) {
    const auto& from = layer.projection;
    const auto own = detail::new_linear(folded, name, from);
    std::ranges::copy(from.bias, own.bias.begin());
    const auto channels = from.inputs() / layer.grid.window_tokens();
    // Token by token of the window, each a linear of its own that adds to the same bias.
    for (index_t t = 0; t < layer.grid.window_tokens(); ++t) {
        const tensor_part part{.channels = {t * channels, channels}};
        fold(norm, linear_view<const T>{from.weight.slice(part), own.bias}, linear_view<T>{own.weight.slice(part), own.bias});
    }
    layer.projection = {own.weight, own.bias, from.products};
    return layer;
}
/// The multi_head that equals `norm` and then `layer`: folded are `q`, `gate` if there is one, and `k` and `v`, or the layer in
/// front of them.
template <FoldableNorm N, Scalar T, Attention A, class R, Norm M>
multi_head<T, A, R, M> fold_into(const N& norm, multi_head<T, A, R, M> layer, parameters& folded, const std::string& name) {
    layer.q = fold_into(norm, layer.q, folded, name + ".q");
    if (layer.gated()) layer.gate = fold_into(norm, layer.gate, folded, name + ".gate");
    if constexpr (layer.reduces) {
        layer.reduce = fold_into(norm, layer.reduce, folded, name + ".reduce");
    } else {
        layer.k = fold_into(norm, layer.k, folded, name + ".k");
        layer.v = fold_into(norm, layer.v, folded, name + ".v");
    }
    return layer;
}
/// The layer in windows that equals `norm` and then `outer`: the layer inside is folded.
template <FoldableNorm N, Layer L>
windowed<L> fold_into(const N& norm, windowed<L> outer, parameters& folded, const std::string& name) {
    outer.layer = fold_into(norm, outer.layer, folded, name);
    return outer;
}

/// The block that equals `block`, to rounding, without norms: what a block trained with batch_norm, rep_batch_norm or
/// progressive_rep_batch_norm becomes for inference. New weights are in `folded`, `name`.attention.q.weight and so on; those that do not
/// change are where they were. Throws as fold_into does, and argument_error if the block has post_norm: what its norms make is read by the
/// sums too. Guo et al. 2024, "SLAB".
template <FoldableNorm N, Layer M, Layer F>
transformer_block<identity_norm<typename M::scalar>, M, F> fold(const transformer_block<N, M, F>& block, parameters& folded,
                                                                const std::string& name = "block") {
    if (block.post_norm) detail::raise(argument_error("fold", "post_norm", "is true, but only norms in front of linears go into them"));
    return {.attention = fold_into(block.attention_norm, block.attention, folded, name + ".attention"),
            .feed_forward = fold_into(block.feed_forward_norm, block.feed_forward, folded, name + ".feed_forward")};
}

} // namespace attn
