// The pre-norm transformer block, over any attention layer, norm and feed-forward layer.
#pragma once

#include "../norm/identity_norm.hpp"
#include "feed_forward.hpp"
#include "multi_head.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A transformer block: attention and a feed-forward network, each behind a norm and added to its input.
/// For tokens x (batch, 1, n, c):
///     y   = x + attention(attention_norm(x)),       out = y + feed_forward(feed_forward_norm(y))
/// attention: a multi_head, a windowed one, or any layer that keeps the shape; a context, from which it takes keys and values, is not
/// normalised. A learned scale of a branch (CaiT's LayerScale) is the last linear with its rows scaled. out may be the tokens themselves.
/// Its residuals are its own: it adds no other. Memory: one more copy of the tokens, and what attention and feed_forward need. Vaswani et
/// al. 2017, "Attention Is All You Need"; the norm in front: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture".
template <Norm N, Layer M, Layer F>
struct transformer_block {
    using scalar = typename M::scalar;
    static constexpr std::string_view name = "transformer_block";
    static constexpr bool has_norms = !std::same_as<N, identity_norm<scalar>>;
    static_assert(has_norms || (M::in_place && F::in_place),
                  "attn: without norms, attention and feed_forward must be able to write where they read");
    static constexpr bool in_place = true;

    N attention_norm = {};
    M attention;
    N feed_forward_norm = {};
    F feed_forward;

    void check(const layer_inputs<scalar>& in) const {
        if (in.residual.data()) throw argument_error(name, "residual", "is given, but a block adds its own tokens");
        detail::check_tokens(name, "tokens", in.tokens, in.tokens.shape().channels);
        const auto& s = in.tokens.shape();
        attention_norm.check(s);
        feed_forward_norm.check(s);
        const auto within = has_norms ? head_major(in.tokens.data(), s) : in.tokens;
        attention.check({.tokens = within, .context = in.context, .value_context = in.value_context, .positions = in.positions});
        feed_forward.check({.tokens = within});
        check_kept("attention", attention.output_shape(s), s);
        check_kept("feed_forward", feed_forward.output_shape(s), s);
    }
    void check_apart(const output_memory& out) const {
        attn::check_apart(attention_norm, out);
        attn::check_apart(attention, out);
        attn::check_apart(feed_forward_norm, out);
        attn::check_apart(feed_forward, out);
    }
    shape output_shape(const shape& tokens) const { return tokens; }
    std::size_t workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        detail::scratch memory;
        take_normal(memory, tokens, context, concurrency);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const auto normal = take_normal(memory, in.tokens.shape(), in.context.shape(), run.concurrency());
        const auto normalised = [&](const N& norm, const tensor_view<const scalar>& x) -> tensor_view<const scalar> {
            if constexpr (has_norms) {
                norm.forward(x, normal, run);
                return normal;
            } else {
                return x;
            }
        };
        attention.forward(
            {.tokens = normalised(attention_norm, in.tokens),
             .residual = in.tokens,
             .context = in.context,
             .value_context = in.value_context,
             .positions = in.positions},
            out,
            run);
        feed_forward.forward({.tokens = normalised(feed_forward_norm, out), .residual = out}, out, run);
    }

private:
    static void check_kept(std::string_view argument, const shape& result, const shape& tokens) {
        if (result != tokens) throw shape_error(name, argument, "makes " + to_string(result) + " of tokens of shape " + to_string(tokens));
    }
    /// The normalised tokens, behind the memory of what is inside.
    tensor_view<scalar> take_normal(detail::scratch& memory, const shape& s, const shape& context, index_t concurrency) const {
        memory.take<std::byte>(static_cast<index_t>(
            std::max({attention_norm.workspace_bytes(s, concurrency), feed_forward_norm.workspace_bytes(s, concurrency),
                      attention.workspace_bytes(s, context, concurrency), feed_forward.workspace_bytes(s, {}, concurrency)})));
        return head_major(has_norms ? memory.take<scalar>(s.size()) : nullptr, s);
    }
};

} // namespace attn
