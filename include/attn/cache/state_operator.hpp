// Which linear attentions have a state, and of what shape.
#pragma once

#include "../attention/feature_map.hpp"
#include "../attention/linear_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a linear_state is given of each token: rows of keys and of values for every kv head.
struct state_layout {
    index_t kv_heads = 1;
    index_t key_channels = 0;   ///< d_k
    index_t value_channels = 0; ///< d_v
};

namespace detail {

/// Throws argument_error if there can be no state of that layout, of numbers of so many bytes.
inline void check_layout(std::string_view operation, const state_layout& l, std::size_t number_bytes) {
    constexpr index_t most = index_t{1} << 40;
    const auto require = [&](const char* what, index_t number, index_t least) {
        if (number < least || number > most)
            detail::raise(argument_error(operation, what, "is ", number, ", not in ", least, " .. ", most));
    };
    require("kv_heads", l.kv_heads, 1);
    require("key_channels", l.key_channels, 1);
    require("value_channels", l.value_channels, 0);
    if (product(l.kv_heads, l.key_channels + 64, l.value_channels + 64, static_cast<index_t>(number_bytes)) > max_bytes)
        detail::raise(argument_error(operation, "kv_heads", "are ", l.kv_heads, " of ", l.key_channels, " x ", l.value_channels,
                                     " channels: more than ", max_bytes_text));
}

/// A causal linear attention: what lies behind its queries is a sum over keys.
template <class Op, class T>
concept HasLinearState = Attention<Op> && TakesLinearRows<Op, T> && std::same_as<decltype(Op::pattern), causal> &&
                         !requires { requires VectorFeatureMap<decltype(Op::feature_map)>; };

/// Says what has a linear_state, where an operator has none.
template <class Op, class T>
constexpr bool require_linear_state() {
    static_assert(HasLinearState<Op, T>, "attn: this operator has no linear_state: linear_attention and simplified_linear_attention with "
                                         "pattern = causal{} have one");
    return true;
}

/// Throws argument_error if the operator refers to something of every token, or reads what comes later.
void check_state_operator(std::string_view operation, const auto& op) {
    if constexpr (requires { op.convolution; }) {
        if (op.positional_encoding.data())
            detail::raise(argument_error(operation, "positional_encoding", "is of all tokens, but a state has some: add it to the keys"));
        if (is_given(op.convolution_input))
            detail::raise(
                argument_error(operation, "convolution_input", "is of all tokens, but a state has some: it convolves its values"));
        if (op.convolution.present() && !op.convolution.causal)
            detail::raise(argument_error(operation, "convolution", "is not causal, but the pattern is"));
    }
}
/// How many tokens before its own a causal operator's convolution reads; of one that attend refuses, at least none.
index_t convolved_before(const auto& op) {
    if constexpr (requires { op.convolution; })
        if (op.convolution.present()) return std::max<index_t>(0, op.convolution.grid(0).left);
    return 0;
}

} // namespace detail

} // namespace attn
