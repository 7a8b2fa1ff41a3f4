#include "linear_case.hpp"

#include "attn/attention/simplified_linear_attention.hpp"
#include "attn/reference/depthwise_convolution.hpp"
#include "attn/reference/depthwise_gradients.hpp"
#include "attn/reference/linear_gradients.hpp"

#include <random>

namespace attn::testing {

using namespace pattern;

namespace {

/// Parameters of a case, random.
template <Scalar T>
struct convolved {
    tensor<T> weights, positional_encoding, input;
    std::vector<T> bias;
    std::vector<index_t> length;

    convolved(const problem& p, const shape& kernel)
        : weights(kernel), positional_encoding({1, p.kv_heads, p.keys, p.key_dim}), input({p.batch, p.kv_heads, p.queries, p.value_dim}) {
        std::mt19937 random(23);
        std::normal_distribution<T> normal(0, T(0.3));
        for (auto* t : {&weights, &positional_encoding, &input})
            std::generate_n(t->data(), t->shape().size(), [&] { return normal(random); });
        bias.resize(static_cast<std::size_t>(kernel.batch * kernel.heads));
        std::ranges::generate(bias, [&] { return normal(random); });
    }
};

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

template <Scalar T, class Op>
auto with_definition(const problem& p, const Op& op, const std::shared_ptr<convolved<T>>& own) {
    const auto g = op.convolution.grid(p.queries);
    const auto reference = [=]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        const auto keys = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        reference::linear_attention<S>({in.queries, keys, in.values, in.positions}, out, relu{}, op.pattern, true, op.eps, 1);
        const auto other = other_input<S>(op, *own);
        reference::add_depthwise_convolution<S, T>(op.convolution_input.data() ? other.view() : in.values, out.values, {g.height, g.width, g.top, g.left},
                                                   op.convolution.weights, op.convolution.bias, present_of(*own, in.positions), first_row(in, p));
    };
    const auto gradients = [=]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
        const auto keys = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        reference::linear_gradients<S>({in.queries, keys, in.values, in.positions}, given.values, wanted, relu{}, op.pattern, true, op.eps, 1);
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
        const auto other = other_input<S>(op, *own);
        const auto from = op.convolution_input.data() ? other.view() : in.values;
        tensor<S> of_input(from.shape());
        const auto of_bias = wanted.parameter(2);
        reference::depthwise_gradients<S, T>(from, given.values, {g.height, g.width, g.top, g.left}, op.convolution.weights, of_input, wanted.parameter(1),
                                             {of_bias.data(), static_cast<std::size_t>(of_bias.shape().size())}, present_of(*own, in.positions));
        if (!op.convolution_input.data()) return add(of_input, wanted.values);
        std::copy_n(of_input.data(), of_input.shape().size(), wanted.parameter(3).data());
    };
    const auto terms = [=](const inputs<double>& in, const tensor_view<const double>& given) {
        const auto keys = reference::sum_of<double, T>(in.keys, op.positional_encoding);
        auto sizes = linear_terms({in.queries, keys, in.values, in.positions}, given, relu{}, op.pattern, true, op.eps, 1);
        sizes.push_back(sizes[1] * static_cast<double>(p.batch)); // of the encoding, which all batch entries share
        return sizes;
    };
    const auto naive = [=](const inputs<T>& in, const outputs<T>& out) {
        const auto keys = reference::sum_of<T, T>(in.keys, op.positional_encoding);
        naive_linear<T>({in.queries, keys, in.values, in.positions}, out, each_number<T>(relu{}), shown_by(op.pattern, in.positions),
                        static_cast<T>(op.eps));
        add_naive_convolution<T>(op.convolution_input.data() ? op.convolution_input : in.values, out.values,
                                 {g.height, g.width, g.top, g.left}, op.convolution.weights, op.convolution.bias);
    };
    const auto taps = static_cast<double>(op.convolution.weights.shape().tokens * op.convolution.weights.shape().channels);
    const auto outputs_of_p = static_cast<double>(p.batch * p.heads * p.queries * p.value_dim);
    return made_with_gradients{made_linear{op, reference, naive, linear_flops(p) + 2 * taps * outputs_of_p, own}, gradients, terms};
}

template <Scalar T>
depthwise_convolution<T> convolution_of(const convolved<T>& own, std::array<index_t, 2> grid, bool causal = false) {
    return {own.weights.view(), own.bias, grid[0], grid[1], causal};
}

bool tokens_agree(const problem& p) { return p.queries == p.keys; }

/// One kernel for all heads on the most square grid, as in vision transformers.
const auto grid_case = linear_case(
    "simplified_linear", "4 n d_k d_v + 50 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<convolved<T>>(p, shape{1, p.value_dim, 5, 5});
        return with_definition<T>(p, simplified_linear_attention<dense, T>{.convolution = convolution_of(*own, grid_of(p.queries))}, own);
    },
    tokens_agree);

/// Kernels for each head on sequences, a positional encoding, and padding.
const auto sequence_case = linear_case(
    "simplified_linear_lengths", "4 n d_k d_v + 14 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<convolved<T>>(p, shape{p.heads, p.value_dim, 1, 7});
        for (index_t b = 0; b < p.batch; ++b)
            own->length.push_back(
                std::max<index_t>(0, p.positions.first_key[b] + (p.batch == 1 ? 2 * p.keys / 3 : p.keys * b / (p.batch - 1))));
        return with_definition<T>(p,
                                  simplified_linear_attention<lengths, T>{.convolution = convolution_of(*own, {0, 0}),
                                                                          .pattern = {own->length},
                                                                          .positional_encoding = own->positional_encoding.view()},
                                  own);
    },
    [](const problem& p) { return tokens_agree(p) && p.batch > 0; });

const auto causal_convolution_case = linear_case(
    "simplified_linear_causal", "4 n d_k d_v + 8 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<convolved<T>>(p, shape{1, p.value_dim, 1, 4});
        return with_definition<T>(p, simplified_linear_attention<causal, T>{.convolution = convolution_of(*own, {0, 0}, true)}, own);
    },
    tokens_agree);

/// The convolution reads a tensor of its own: keys and values may be fewer than queries.
const auto other_input_case = linear_case(
    "simplified_linear_other_input", "2 (n + m) d_k d_v + 18 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<convolved<T>>(p, shape{1, p.value_dim, 3, 3});
        return with_definition<T>(p,
                                  simplified_linear_attention<dense, T>{.convolution = convolution_of(*own, grid_of(p.queries)),
                                                                        .convolution_input = own->input.view()},
                                  own);
    },
    [](const problem&) { return true; });

} // namespace

} // namespace attn::testing
