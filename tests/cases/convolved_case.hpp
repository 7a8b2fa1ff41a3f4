// What the cases of linear attentions with a convolution share: parameters, and the definition of what these add.
#pragma once

#include "attn/attention/depthwise_convolution.hpp"
#include "attn/reference/depthwise_convolution.hpp"
#include "linear_case.hpp"

namespace attn::testing {

/// Parameters of a case, random.
template <Scalar T>
struct convolved {
    tensor<T> weights, positional_encoding, input;
    std::vector<T> bias;
    std::vector<index_t> length;

    convolved(const problem& p, const shape& kernel)
        : weights(kernel), positional_encoding({1, p.kv_heads, p.keys, p.key_dim}), input({p.batch, p.kv_heads, p.queries, p.value_dim}) {
        std::mt19937 random(23);
        const auto number = [&] { return random_parameter(random, T(0.3)); };
        for (auto* t : {&weights, &positional_encoding, &input})
            std::generate_n(t->data(), t->shape().size(), number);
        bias.resize(static_cast<std::size_t>(kernel.batch * kernel.heads));
        std::ranges::generate(bias, number);
    }
};

/// Lengths that leave padding: of several batch entries the first is all padding, and the last has none.
inline std::vector<index_t> some_lengths(const problem& p) {
    std::vector<index_t> length;
    for (index_t b = 0; b < p.batch; ++b)
        length.push_back(std::max<index_t>(0, p.positions.first_key[b] + (p.batch == 1 ? 2 * p.keys / 3 : p.keys * b / (p.batch - 1))));
    return length;
}
/// How many values are there, where lengths say so.
template <Scalar T>
std::vector<index_t> present_of(const convolved<T>& own, const positions& where) {
    std::vector<index_t> present;
    for (index_t b = 0; b < std::ssize(own.length); ++b) present.push_back(own.length[static_cast<std::size_t>(b)] - where.first_key[b]);
    return present;
}
/// The tensor of its own that the convolution reads, if it does.
template <Scalar S, class Op, Scalar T>
tensor<S> other_input(const Op& op, const convolved<T>& own) {
    tensor<S> other(op.convolution_input.data() ? op.convolution_input.shape() : shape{});
    std::copy_n(own.input.data(), other.shape().size(), other.data());
    return other;
}

/// Adds the convolution to out, by its definition.
template <Scalar S, class Op, Scalar T>
void add_convolution(const Op& op, const convolved<T>& own, const inputs<S>& in, const outputs<S>& out, const problem& p) {
    const auto g = op.convolution.grid(p.queries);
    const auto other = other_input<S>(op, own);
    reference::add_depthwise_convolution<S, T>(op.convolution_input.data() ? other.view() : in.values.numbers(), out.values, {g.height, g.width, g.top, g.left},
                                               op.convolution.weights, op.convolution.bias, present_of(own, in.positions), first_row(in, p));
}
/// Completes the gradients of queries, keys and values by those of the encoding and the convolution, by their definitions.
template <Scalar S, class Op, Scalar T>
void add_local_gradients(const Op& op, const convolved<T>& own, const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
    const auto add = [](const tensor_view<const S>& from, const tensor_view<S>& to) { // summed over what `to` has once
        const auto &all = from.shape(), &s = to.shape();
        for (index_t b = 0; b < all.batch; ++b)
            for (index_t h = 0; h < all.heads; ++h)
                for (index_t i = 0; i < all.tokens; ++i)
                    for (index_t c = 0; c < all.channels; ++c) to(s.batch == 1 ? 0 : b, s.heads == 1 ? 0 : h, i, c) += from(b, h, i, c);
    };
    if (const auto of_encoding = wanted.parameter(0); of_encoding.shape().size() > 0) {
        std::fill_n(of_encoding.data(), of_encoding.shape().size(), S{0});
        add(wanted.keys, of_encoding);
    }
    const auto g = op.convolution.grid(in.queries.shape().tokens);
    const auto other = other_input<S>(op, own);
    const auto from = op.convolution_input.data() ? other.view() : in.values.numbers();
    tensor<S> of_input(from.shape());
    const auto of_bias = wanted.parameter(2);
    reference::depthwise_gradients<S, T>(from, given.values, {g.height, g.width, g.top, g.left}, op.convolution.weights, of_input, wanted.parameter(1),
                                         {of_bias.data(), static_cast<std::size_t>(of_bias.shape().size())}, present_of(own, in.positions));
    if (!op.convolution_input.data()) return add(of_input, wanted.values);
    std::copy_n(of_input.data(), of_input.shape().size(), wanted.parameter(3).data());
}

template <Scalar T>
depthwise_convolution<T> convolution_of(const convolved<T>& own, std::array<index_t, 2> grid, bool causal = false) {
    return {own.weights.view(), own.bias, grid[0], grid[1], causal};
}

inline bool tokens_agree(const problem& p) { return p.queries == p.keys; }

} // namespace attn::testing
