#include "convolved_case.hpp"

#include "attn/attention/simplified_linear_attention.hpp"
#include "attn/attention/simplified_linear_backward.hpp"
#include "attn/reference/linear_attention.hpp"

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T, class Op>
auto with_definition(const problem& p, const Op& op, const std::shared_ptr<convolved<T>>& own) {
    const auto g = op.convolution.grid(p.queries);
    const auto reference = [=]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        const auto keys = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        reference::linear_attention<S>({in.queries, keys, in.values, in.positions}, out, relu{}, op.pattern, true, op.eps, 1);
        add_convolution<S>(op, *own, in, out, p);
    };
    const auto gradients = [=]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
        const auto keys = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        reference::linear_gradients<S>({in.queries, keys, in.values, in.positions}, given.values, wanted, relu{}, op.pattern, true, op.eps, 1);
        add_local_gradients<S>(op, *own, in, given, wanted);
    };
    const auto terms = [=](const inputs<double>& in, const tensor_view<const double>& given) {
        const auto keys = reference::sum_of<double, T>(in.keys, op.positional_encoding);
        auto sizes = linear_terms({in.queries, keys, in.values, in.positions}, given, relu{}, op.pattern, true, op.eps, 1);
        sizes.push_back(sizes[1] * static_cast<double>(p.batch)); // of the encoding, which all batch entries share
        return sizes;
    };
    const auto naive = [=](const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) {
        const auto keys = reference::sum_of<T, T>(in.keys, op.positional_encoding);
        by.linear({in.queries, keys, in.values, in.positions}, out, each_number<T>(relu{}), shown_by(op.pattern, in.positions),
                  static_cast<T>(op.eps));
        by.add_convolution(op.convolution_input.data() ? op.convolution_input : in.values.numbers(), out.values, {g.height, g.width, g.top, g.left},
                           op.convolution.weights, op.convolution.bias);
    };
    const auto taps = static_cast<double>(op.convolution.weights.shape().tokens * op.convolution.weights.shape().channels);
    const auto outputs_of_p = static_cast<double>(p.batch * p.heads * p.queries * p.value_dim);
    return made_with_gradients{made_linear{op, reference, naive, linear_flops(p) + 2 * taps * outputs_of_p, own}, gradients, terms};
}

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
        own->length = some_lengths(p);
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
