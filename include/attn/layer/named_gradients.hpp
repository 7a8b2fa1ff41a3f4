// Gradients by the names of their weights: a tensor for each, and a layer's gradients as views of them.
#pragma once

#include "named_layers.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Tensors of zeros, in T, of the names and sizes of others: the gradients of weights, or what an optimiser keeps of each. What is kept as
/// bytes has none.
template <Scalar T>
[[nodiscard]] parameters zeros_like(const parameters& weights) {
    parameters zeros;
    for (const auto& name : weights.names())
        if (weights.other_type(name).empty()) zeros.add<T>(name, weights.size(name));
    return zeros;
}

namespace detail {

/// The numbers of a tensor, to be written; none if it is missing.
template <Scalar T>
std::span<T> elements_if_any(parameters& gradients, const std::string& name) {
    return gradients.contains(name) ? gradients.elements<T>(name) : std::span<T>{};
}

/// The gradients of a linear whose weight is rows of a tensor of `all` rows, from `first` on, and whose bias is such a part of another.
template <Scalar T>
typename linear<T>::gradients named_gradients(const linear<T>& of, parameters& gradients, const std::string& name, index_t first,
                                              index_t all) {
    const auto [weight, bias] = gradients.names_of_linear(name);
    const auto matrix = gradients.writable<T>(weight);
    const auto& size = gradients.size(weight);
    const auto outputs = of.outputs(), inputs = of.inputs();
    if (size.size() < 2 || size[0] != all || matrix.shape().size() != all * inputs)
        parameters::refuse(weight, "has shape ", parameters::text_of(size), ", but its layer's weight has ", all, " outputs of ", inputs,
                           " inputs");
    typename linear<T>::gradients result{
        .weight = {matrix.data() + first * inputs, {.tokens = outputs, .channels = inputs}, {all * inputs, all * inputs, inputs, 1}}};
    if (const auto numbers = elements_if_any<T>(gradients, bias); !numbers.empty()) {
        if (std::ssize(numbers) != all)
            parameters::refuse(bias, "has ", std::ssize(numbers), " numbers, but its layer has ", all, " outputs");
        result.bias = numbers.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(outputs));
    }
    return result;
}

} // namespace detail

/// The gradients of a linear that has its weight and bias by that name, as parameters::get_linear finds them: views of tensors of the same
/// names, which a backward writes.
///     parameters gradients = zeros_like<float>(weights);
///     backward(layer, in, kept, d_out, {.parameters = get_gradients(layer, gradients, "head")});
/// A bias has a gradient if there is a tensor for it. Throws parameter_error if that of the weight is missing, of another type than T, or
/// of another size.
template <Scalar T>
[[nodiscard]] typename linear<T>::gradients get_gradients(const linear<T>& layer, parameters& gradients, const std::string& name) {
    return detail::named_gradients(layer, gradients, name, 0, layer.outputs());
}

/// The gradients of a multi_head's linears, by the names that get_multi_head knows. What else the layer has, such as a gate, norms or the
/// attention's own parameters, is a member to be set. Throws parameter_error as for a linear, and if none of the names is there or two are.
template <Scalar T, Attention A, class R, Norm N>
[[nodiscard]] typename multi_head<T, A, R, N>::gradients get_gradients(const multi_head<T, A, R, N>& layer, parameters& gradients,
                                                                       const std::string& prefix) {
    static_assert(!A::traits.keys_are_queries, "attn: get_gradients writes those of keys, and this operator's keys are its queries");
    const auto name = detail::names_in<3>(gradients, prefix, detail::attention_names);
    const auto result = detail::names_in<1>(gradients, prefix, detail::result_names);
    const auto q = layer.q.outputs(), k = layer.k.outputs(), all = q + k + layer.v.outputs();
    const auto of = [&](const linear<T>& l, std::size_t own, index_t first) {
        if (name[1][0] == '\0') return detail::named_gradients(l, gradients, prefix + name[0], first, all); // one linear of all three
        return get_gradients(l, gradients, prefix + name[own]);
    };
    return {.q = of(layer.q, 0, 0),
            .k = of(layer.k, 1, q),
            .v = of(layer.v, 2, q + k),
            .out = get_gradients(layer.out, gradients, prefix + result[0])};
}

/// The gradients of a feed-forward layer, by the names that get_feed_forward knows. Throws parameter_error as for a linear, and if none of
/// the names is there or two are.
template <Scalar T, Activation F>
[[nodiscard]] typename feed_forward<T, F>::gradients get_gradients(const feed_forward<T, F>& layer, parameters& gradients,
                                                                   const std::string& prefix) {
    const auto name = detail::names_in<3>(gradients, prefix, detail::feed_forward_names);
    const auto of = [&](const linear<T>& l, std::size_t own) { return get_gradients(l, gradients, prefix + name[own]); };
    typename feed_forward<T, F>::gradients result{.up = of(layer.up, 0), .down = of(layer.down, 1)};
    if (layer.gated()) result.gate = of(layer.gate, 2);
    return result;
}

/// The gradients of a norm by channel: `name`.weight, `name`.bias and, of a rep_batch_norm, `name`.eta; those that there are tensors for.
/// Throws parameter_error if there is none, or if one is of another type.
template <DifferentiableNorm N>
    requires std::derived_from<typename N::gradients, norm_gradients<typename N::scalar>>
[[nodiscard]] typename N::gradients get_gradients(const N&, parameters& gradients, const std::string& name) {
    using scalar = typename N::scalar;
    typename N::gradients result;
    result.weight = detail::elements_if_any<scalar>(gradients, name + ".weight");
    result.bias = detail::elements_if_any<scalar>(gradients, name + ".bias");
    if (result.weight.empty() && result.bias.empty()) parameters::refuse(name + ".weight", "is missing");
    if constexpr (requires { result.eta; }) result.eta = detail::elements_if_any<scalar>(gradients, name + ".eta");
    return result;
}

/// The gradients of a block, by the names that get_transformer_block knows. Throws parameter_error if a part is missing, and as for
/// the parts.
template <Norm N, Layer M, Layer F>
[[nodiscard]] typename transformer_block<N, M, F>::gradients get_gradients(const transformer_block<N, M, F>& block, parameters& gradients,
                                                                           const std::string& prefix) {
    const auto names = detail::names_of_block(gradients, prefix);
    return {.attention_norm = get_gradients(block.attention_norm, gradients, names.attention_norm),
            .attention = get_gradients(block.attention, gradients, names.attention),
            .feed_forward_norm = get_gradients(block.feed_forward_norm, gradients, names.feed_forward_norm),
            .feed_forward = get_gradients(block.feed_forward, gradients, names.feed_forward)};
}

} // namespace attn
