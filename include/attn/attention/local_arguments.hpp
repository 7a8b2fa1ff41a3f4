// What the linear attentions of vision transformers have besides queries, keys and values: a convolution and an encoding.
#pragma once

#include "../core/gradients.hpp"
#include "depthwise_convolution.hpp"
#include "linear_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of the inputs of a linear attention with a convolution, and of what the operator refers to, in the same shapes.
template <Scalar T>
struct local_gradients : input_gradients<T> {
    tensor_view<T> positional_encoding = {}; ///< summed over what it is repeated for
    depthwise_gradients<T> convolution = {}; ///< its input: convolution_input, if that is not the values
};

namespace detail {

/// What a linear attention of vision transformers has besides queries, keys and values.
template <Scalar T, class U>
struct local_arguments {
    const depthwise_convolution<U>& convolution;
    const tensor_view<const U>&convolution_input, &positional_encoding;

    explicit local_arguments(const auto& op)
        : convolution(op.convolution), convolution_input(op.convolution_input), positional_encoding(op.positional_encoding) {}

    /// Throws attention_error if the convolution, its input or the positional encoding do not fit.
    template <Pattern P>
    void check(std::string_view operation, const inputs<T>& in, const P&) const {
        static_assert(std::same_as<T, U>, "attn: convolution, encoding and scale have the scalar type of the tokens: for double, "
                                          "simplified_linear_attention<pattern, double> and focused_linear_attention<pattern, double>");
        const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
        check_view(operation, "positional_encoding", positional_encoding);
        if (const auto& p = positional_encoding.shape();
            positional_encoding.data() && ((p.batch != 1 && p.batch != k.batch) || (p.heads != 1 && p.heads != k.heads) ||
                                           p.tokens != k.tokens || p.channels != k.channels))
            refuse(operation, "positional_encoding", p, "k", k, "they do not fit");
        if (!convolution.present()) return;
        check_view(operation, "convolution_input", convolution_input);
        const auto& x = is_given(convolution_input) ? convolution_input.shape() : v;
        if (x.batch != v.batch || x.heads != v.heads || x.channels != v.channels)
            refuse(operation, "convolution_input", x, "v", v, "batch, heads or channels differ");
        if (x.tokens != q.tokens) {
            if (is_given(convolution_input)) refuse(operation, "convolution_input", x, "q", q, "the tokens differ");
            refuse(operation, "v", v, "q", q, "the convolution adds tokens of v to tokens of q (convolution_input may be another tensor)");
        }
        if (follows_queries<decltype(at(std::declval<const P&>(), index_t{}, index_t{}))> && !convolution.causal)
            detail::raise(argument_error(operation, "convolution", "is not causal, but the pattern is"));
        convolution.check(operation, x, {q.batch, q.heads, q.tokens, v.channels});
    }
    void check_apart(const output_memory& out) const {
        convolution.check_apart(out);
        out.require_apart("positional_encoding", positional_encoding);
        out.require_apart("convolution_input", convolution_input);
    }
    /// Checks the wanted gradients of the convolution and the encoding, as an operator's check_gradients does.
    void check_gradients(std::string_view operation, const local_gradients<T>& wanted, const auto& check) const {
        const auto& own = wanted.convolution;
        const auto check_one = [&](std::string_view argument, const auto& view, bool is_there, const shape& expected) {
            check_wanted(operation, argument, view, is_there, expected, check);
        };
        check_one("wanted.positional_encoding", wanted.positional_encoding, positional_encoding.data(), positional_encoding.shape());
        check_one("wanted.convolution.input", own.input, is_given(convolution_input), convolution_input.shape());
        check_one("wanted.convolution.weights", own.weights, convolution.present(), convolution.weights.shape());
        check_one("wanted.convolution.bias", as_row(own.bias), !convolution.bias.empty(),
                  {.tokens = 1, .channels = std::ssize(convolution.bias)});
    }
    /// Whether the convolution reads the values, as it does without a `convolution_input`.
    bool reads_values() const { return !is_given(convolution_input); }
    /// The local term of a call, as the kernel computes it.
    kernel::local_term<T, U> term(const inputs<T>& in, const linear_rows<T>& rows) const {
        kernel::local_term<T, U> local{{convolution.present() ? convolution.grid(rows.queries) : kernel::convolution_grid{},
                                        convolution.kernels(in.values.shape().channels), convolution.bias},
                                       in.values,
                                       reads_values(),
                                       rows.first_query};
        if (rows.convolution_input.data()) local.input = rows.convolution_input;
        else if constexpr (std::same_as<T, U>) // check says what else is wrong, once
            if (!reads_values()) local.input = convolution_input;
        return local;
    }
};

} // namespace detail

} // namespace attn
