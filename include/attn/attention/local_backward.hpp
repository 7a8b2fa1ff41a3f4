// The gradient of what a linear attention of vision transformers has besides queries, keys and values: its convolution and its encoding.
#pragma once

#include "../kernel/linear/order.hpp"
#include "backward.hpp"
#include "depthwise_backward.hpp"
#include "local_arguments.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T, class U>
struct local_backward {
    local_arguments<T, U> of;

    explicit local_backward(const auto& op) : of(op) {}

    /// Takes memory for two kernels that run one after the other: the linear attention's, which needs so many bytes, and the convolution's.
    std::byte* take_memory(scratch& memory, std::size_t bytes, const input_shapes& s, const shape& out, index_t concurrency) const {
        const auto& read = is_given(of.convolution_input) ? of.convolution_input.shape() : s.values;
        if (of.convolution.present())
            bytes = std::max(
                bytes, kernel::depthwise_backward<T, U>(of.convolution.grid(s.queries.tokens), read, out).workspace_bytes(concurrency));
        return memory.take<std::byte>(static_cast<index_t>(bytes));
    }
    /// of_encoding = of_keys, summed over the batch entries and heads that the encoding is repeated for.
    static void sum_repeated(const tensor_view<T>& of_keys, const tensor_view<T>& of_encoding, const execution& run) {
        const auto &all = of_keys.shape(), &s = of_encoding.shape();
        run.for_each(s.batch * s.heads, [&](index_t plane, index_t) {
            const auto entry = plane / s.heads, head = plane % s.heads;
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < s.channels; ++c) {
                    T sum = 0;
                    for (auto b = s.batch == 1 ? 0 : entry; b < (s.batch == 1 ? all.batch : entry + 1); ++b)
                        for (auto h = s.heads == 1 ? 0 : head; h < (s.heads == 1 ? all.heads : head + 1); ++h) sum += of_keys(b, h, i, c);
                    of_encoding(entry, head, i, c) = sum;
                }
        });
    }
    /// The encoding's gradient, of that of the keys, and the convolution's; that of the values it adds to what is there.
    template <Pattern P>
    void backward(const inputs<T>& in, const P& pattern, const tensor_view<const T>& d_out, const tensor_view<T>& of_keys,
                  const local_gradients<T>& wanted, const execution& run) const {
        if (wanted.positional_encoding.data()) sum_repeated(of_keys, wanted.positional_encoding, run);
        if (!of.convolution.present()) return;
        const auto tokens = in.queries.shape().tokens, channels = in.values.shape().channels;
        const auto term = of.term(in, all_rows(in));
        const auto grid = of.convolution.grid(tokens);
        const kernel::linear_order<T, P> order{in, pattern};
        const auto& own = wanted.convolution;
        const auto weights = own.weights.data() ? of.convolution.kernels_of(own.weights, channels) : tensor_view<T>{};
        kernel::depthwise_backward<T, U>(grid, term.input.shape(), d_out.shape())(
            {grid, of.convolution.kernels(channels), of.convolution.bias}, term.input.numbers(), d_out,
            {term.reads_values ? wanted.values : own.input, weights, own.bias, term.reads_values},
            [&](index_t b) { return term.reads_values ? order.ever_seen(b) : tokens; }, run.workspace().bytes().data(), run);
    }
};

} // namespace detail

} // namespace attn
