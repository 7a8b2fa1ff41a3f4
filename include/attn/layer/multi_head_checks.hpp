// What a multi_head refuses of its inputs and of its linears.
#pragma once

#include "linear.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Throws shape_error unless the linear's outputs are those of so many heads.
template <Scalar T>
void check_heads(std::string_view operation, std::string_view argument, const linear<T>& l, index_t inputs, index_t heads) {
    l.check(operation, argument, l.outputs(), inputs);
    if (l.outputs() % heads != 0)
        detail::raise(
            shape_error(operation, argument, "has a weight of shape ", l.weight.shape(), ", whose outputs do not make ", heads, " heads"));
}
/// Throws shape_error unless heads of keys have as many channels as those of queries.
inline void check_key_channels(std::string_view operation, index_t q_outputs, index_t heads, index_t k_outputs, index_t kv_heads) {
    if (k_outputs / kv_heads != q_outputs / heads)
        detail::raise(shape_error(operation, "k", "has ", k_outputs, " outputs, ", k_outputs / kv_heads, " for each of ", kv_heads,
                                  " kv_heads, but q has ", q_outputs, ", ", q_outputs / heads, " for each of ", heads, " heads"));
}
/// Throws attention_error unless what an operator whose keys are its queries has no use for is left out.
template <Scalar T>
void check_shared_keys(std::string_view operation, std::string_view attention, const linear<T>& k, index_t heads, index_t kv_heads,
                       const layer_inputs<T>& in) {
    if (is_given(k.weight) || !k.bias.empty())
        detail::raise(argument_error(operation, "k", "is given, but the keys of ", attention, " are its queries: leave it out"));
    if (kv_heads != heads)
        detail::raise(argument_error(operation, "kv_heads", "are ", kv_heads, ", but the keys of ", attention, " are its queries, of ",
                                     heads, " heads"));
    if (is_given(in.context))
        detail::raise(argument_error(operation, "context", "is given, but the keys of ", attention, " are its queries"));
}
/// Throws attention_error unless the values' own context goes with that of the keys.
template <Scalar T>
void check_value_context(std::string_view operation, const layer_inputs<T>& in, index_t inputs, bool reduces) {
    const auto &keys = in.context.shape(), &values = in.value_context.shape();
    if (reduces || !is_given(in.context))
        detail::raise(
            argument_error(operation, "value_context",
                           reduces ? "is given, but what is reduced is both keys and values" : "is given without a context, of the keys"));
    check_tokens(operation, "value_context", in.value_context, inputs);
    if (values.batch != keys.batch || values.tokens != keys.tokens)
        detail::raise(shape_error(operation, "value_context", "has shape ", values, ", but the context has ", keys));
}

} // namespace attn::detail
