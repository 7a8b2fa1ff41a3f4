// Layers from the names that PyTorch, timm, diffusers, BERT and LLaMA give to their weights.
#pragma once

#include "../attention/softmax_attention.hpp"
#include "feed_forward.hpp"
#include "multi_head.hpp"
#include "parameters.hpp"
#include "transformer_block.hpp"

#include <array>
#include <set>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Parameters that stay where they are, const or not.
template <class P>
concept NamedTensors = std::same_as<std::remove_const_t<P>, parameters>;

/// The names of the linears that make up a layer, in one order; "" is of one that it has not.
template <std::size_t count>
using linear_names = std::array<const char*, count>;

/// The one of several sets of names of which a layer has the first. Throws parameter_error if it is none, or more.
template <std::size_t count>
linear_names<count> names_in(const parameters& weights, const std::string& prefix, std::span<const linear_names<count>> known) {
    const linear_names<count>* found = nullptr;
    std::string all;
    for (const auto& names : known) {
        all += (all.empty() ? "" : ", ") + std::string(names[0]);
        if (!weights.contains_linear(prefix + names[0])) continue;
        if (found) parameters::refuse(prefix + names[0] + ".weight", "is there beside \"", prefix, (*found)[0], "\": which one is meant?");
        found = &names;
    }
    if (!found) parameters::refuse(prefix + known.front()[0] + ".weight", "is missing, and the layer has no other name of these: ", all);
    return *found;
}

/// What attention's linears are called: of queries, keys and values, or one of all three; and of the result.
inline constexpr std::array attention_names{
    linear_names<3>{"q", "k", "v"},           linear_names<3>{"q_proj", "k_proj", "v_proj"},
    linear_names<3>{"query", "key", "value"}, linear_names<3>{"self.query", "self.key", "self.value"},
    linear_names<3>{"to_q", "to_k", "to_v"},  linear_names<3>{"wq", "wk", "wv"},
    linear_names<3>{"qkv", "", ""},           linear_names<3>{"Wqkv", "", ""},
    linear_names<3>{"qkv_proj", "", ""},      linear_names<3>{"in_proj", "", ""}};
inline constexpr std::array result_names{linear_names<1>{"out"},      linear_names<1>{"out_proj"}, linear_names<1>{"o_proj"},
                                         linear_names<1>{"o"},        linear_names<1>{"proj"},     linear_names<1>{"output.dense"},
                                         linear_names<1>{"to_out.0"}, linear_names<1>{"wo"}};
/// What the linears of a feed-forward layer are called: up, down, and the gate's.
inline constexpr std::array feed_forward_names{linear_names<3>{"up", "down", "gate"},
                                               linear_names<3>{"up_proj", "down_proj", "gate_proj"},
                                               linear_names<3>{"w3", "w2", "w1"},
                                               linear_names<3>{"fc1_x", "fc2", "fc1_g"},
                                               linear_names<3>{"fc1", "fc2", ""},
                                               linear_names<3>{"linear1", "linear2", ""},
                                               linear_names<3>{"intermediate.dense", "output.dense", ""}};

/// What the parts of a block are called: the beginnings of its attention's names and of its feed-forward layer's, and its norms.
struct block_names {
    std::string attention, feed_forward, attention_norm, feed_forward_norm;
    bool post_norm = false;
};
/// The names of a block that are there, with its prefix. Throws parameter_error if none are.
inline block_names names_of_block(const parameters& weights, const std::string& prefix) {
    static const std::array known{block_names{"attn.", "mlp.", "norm1", "norm2"},
                                  block_names{"self_attn.", "mlp.", "input_layernorm", "post_attention_layernorm"},
                                  block_names{"self_attn.", "", "norm1", "norm2", true},
                                  block_names{"attention.", "", "attention.output.LayerNorm", "output.LayerNorm", true}};
    const auto has = [&](const std::string& begin, const auto& names) {
        return std::ranges::any_of(names, [&](const auto& each) { return weights.contains_linear(prefix + begin + each[0]); });
    };
    for (const auto& n : known)
        if (has(n.attention, attention_names) && has(n.feed_forward, feed_forward_names))
            return {prefix + n.attention, prefix + n.feed_forward, prefix + n.attention_norm, prefix + n.feed_forward_norm, n.post_norm};
    parameters::refuse(prefix + "attn.q.weight", "is missing, or \"", prefix,
                       "mlp.up.weight\", and the block has no other names: ", "self_attn. and mlp., self_attn. alone, attention. alone");
}
/// Throws parameter_error if a tensor with the block's prefix is none of its parts': the block would compute without it. Frequencies of
/// rotary positions, which old files have, are no weights.
inline void check_all_of_block(const parameters& weights, const std::string& prefix, const block_names& block) {
    std::set<std::string> known;
    const auto add = [&](const std::string& begin, const auto& names) {
        for (const char* own : names) {
            const auto [weight, bias] = weights.names_of_linear(begin + own);
            known.insert({weight, bias});
        }
    };
    add(block.attention, names_in<3>(weights, block.attention, attention_names));
    add(block.attention, names_in<1>(weights, block.attention, result_names));
    add(block.feed_forward, names_in<3>(weights, block.feed_forward, feed_forward_names));
    for (const auto& norm : {block.attention_norm, block.feed_forward_norm}) known.insert({norm + ".weight", norm + ".bias"});
    for (const auto& name : weights.names())
        if (name.starts_with(prefix) && !known.contains(name) && !name.ends_with("rotary_emb.inv_freq"))
            parameters::refuse(name, "is none that get_transformer_block knows: make the block of its parts");
}

} // namespace detail

/// The multi-head attention whose linears are `prefix` and one of these names:
///     queries, keys and values     q k v,  q_proj k_proj v_proj,  query key value,  self.query self.key self.value,  to_q to_k to_v,
///                                  wq wk wv;  or one linear of all queries, then all keys, then all values:  qkv, Wqkv, qkv_proj, in_proj
///     the result                   out,  out_proj,  o_proj,  o,  proj,  output.dense,  to_out.0,  wo
/// Each is a `.weight` (outputs, inputs) and, if there is one, a `.bias`; so a file of PyTorch's MultiheadAttention ("self_attn."), timm's
/// ("blocks.0.attn."), BERT's ("encoder.layer.0.attention.") or LLaMA's ("model.layers.0.self_attn.") is read as it is. heads: of the
/// queries; those of keys and values are as many as have the size of a query's head. What else a layer has, such as rotation, norms or a
/// gate, is a member to be set. A linear in which heads or columns lie otherwise (GPT-NeoX, GPT-2) has none of these names. The layer
/// refers to the parameters, which it does not outlive. Throws parameter_error as get_linear does, if none of the names is there or two
/// are, or if the outputs are not so many heads.
template <Scalar T, Attention A = softmax_attention<>, detail::NamedTensors P>
[[nodiscard]] multi_head<T, A> get_multi_head(P& weights, const std::string& prefix, index_t heads, const A& attention = {}) {
    static_assert(!A::traits.keys_are_queries, "attn: get_multi_head reads keys, and this operator's are its queries");
    if (heads < 1) detail::raise(argument_error("get_multi_head", "heads", "are ", heads, ": one at least is needed"));
    const auto name = detail::names_in<3>(weights, prefix, detail::attention_names);
    const auto linear_of = [&](const char* own) { return weights.template get_linear<T>(prefix + own); };
    multi_head<T, A> layer{.heads = heads, .q = linear_of(name[0]), .v = {}, .out = {}, .attention = attention};
    layer.out = linear_of(detail::names_in<1>(weights, prefix, detail::result_names)[0]);
    const bool is_one = name[1][0] == '\0';
    const auto head = (is_one ? layer.out.inputs() : layer.q.outputs()) / heads;
    const auto refuse = [&](const char* own, const linear<T>& of) {
        parameters::refuse(prefix + own + ".weight", "has ", of.outputs(), " outputs, which are not those of ", heads, " heads of queries");
    };
    if (is_one) {
        const auto all = layer.q;
        const auto others = head > 0 ? all.outputs() / head - heads : 0;
        layer.kv_heads = others / 2;
        if (layer.kv_heads < 1 || (heads + 2 * layer.kv_heads) * head != all.outputs()) refuse(name[0], all);
        const auto parts = split_outputs<3>(all, {heads * head, layer.kv_heads * head, layer.kv_heads * head});
        layer.q = parts[0], layer.k = parts[1], layer.v = parts[2];
    } else {
        if (head < 1 || heads * head != layer.q.outputs()) refuse(name[0], layer.q);
        layer.k = linear_of(name[1]), layer.v = linear_of(name[2]);
        layer.kv_heads = layer.k.outputs() / head;
        if (layer.kv_heads < 1 || layer.kv_heads * head != layer.k.outputs()) refuse(name[1], layer.k);
    }
    return layer;
}

/// The feed-forward layer whose linears are `prefix` and one of these rows of names:
///     up down gate,  up_proj down_proj gate_proj (LLaMA),  w3 w2 w1,  fc1_x fc2 fc1_g,  fc1 fc2 (timm),  linear1 linear2 (PyTorch),
///     intermediate.dense output.dense (BERT)
/// A gate is read where there is one. activation: gelu unless another is given; LLaMA's is silu. The layer refers to the parameters, which
/// it does not outlive. Throws parameter_error as get_linear does, and if none of the names is there or two are.
template <Scalar T, Activation F = gelu, detail::NamedTensors P>
[[nodiscard]] feed_forward<T, F> get_feed_forward(P& weights, const std::string& prefix, const F& activation = {}) {
    const auto name = detail::names_in<3>(weights, prefix, detail::feed_forward_names);
    const auto linear_of = [&](const char* own) { return weights.template get_linear<T>(prefix + own); };
    feed_forward<T, F> layer{.up = linear_of(name[0]), .down = linear_of(name[1]), .activation = activation};
    if (name[2][0] != '\0' && weights.contains_linear(prefix + name[2])) layer.gate = linear_of(name[2]);
    return layer;
}

/// The norm that has its weight and bias by that name: `name`.weight and, of a norm that adds one, `name`.bias if there is one. What else
/// it has, such as eps, is that of the norm given. It refers to the parameters, which it does not outlive. Throws parameter_error if the
/// weight is missing, and as get_vector.
template <Norm N, detail::NamedTensors P>
    requires requires(N n) { n.weight = std::span<const typename N::scalar>(); }
[[nodiscard]] N get_norm(P& weights, const std::string& name, N norm = {}) {
    norm.weight = weights.template get_vector<typename N::scalar>(name + ".weight");
    if constexpr (requires { norm.bias; })
        if (weights.contains(name + ".bias")) norm.bias = weights.template get_vector<typename N::scalar>(name + ".bias");
    return norm;
}

/// The transformer block whose parts are `prefix` and one of these rows of names, and in them those of get_multi_head and get_feed_forward:
///     timm                 attn.       mlp.    norm1                         norm2
///     LLaMA                self_attn.  mlp.    input_layernorm               post_attention_layernorm
///     PyTorch, post_norm   self_attn.          norm1                         norm2
///     BERT, post_norm      attention.          attention.output.LayerNorm    output.LayerNorm
/// norm: the kind of both, and its eps. What else the block has is a member to be set: `block.attention.rotation = &turns`; or post_norm of
/// a PyTorch layer made with norm_first, which names do not tell. Throws parameter_error if a part is missing; if there is another
/// tensor of that prefix, unless that is "", such as another norm's, without which the block would be another; and as get_multi_head,
/// get_feed_forward and get_norm.
template <Norm N, Attention A = softmax_attention<>, Activation F = gelu, detail::NamedTensors P>
[[nodiscard]] auto get_transformer_block(P& weights, const std::string& prefix, index_t heads, const N& norm, const A& attention = {},
                                         const F& activation = {}) {
    using T = typename N::scalar;
    const auto names = detail::names_of_block(weights, prefix);
    if (!prefix.empty()) detail::check_all_of_block(weights, prefix, names);
    return transformer_block<N, multi_head<T, A>, feed_forward<T, F>>{
        .attention_norm = get_norm(weights, names.attention_norm, norm),
        .attention = get_multi_head<T>(weights, names.attention, heads, attention),
        .feed_forward_norm = get_norm(weights, names.feed_forward_norm, norm),
        .feed_forward = get_feed_forward<T>(weights, names.feed_forward, activation),
        .post_norm = names.post_norm};
}

// Layers refer to the parameters, so these are to have a name.
template <Scalar T>
void get_multi_head(const parameters&&, auto&&...) = delete;
template <Scalar T>
void get_feed_forward(const parameters&&, auto&&...) = delete;
void get_norm(const parameters&&, auto&&...) = delete;
void get_transformer_block(const parameters&&, auto&&...) = delete;

} // namespace attn
