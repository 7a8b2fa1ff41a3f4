#include "linear_case.hpp"

#include "attn/attention/linear_attention.hpp"
#include "attn/attention/linear_backward.hpp"
#include "attn/reference/linear_attention.hpp"

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T, class Op>
auto with_definition(const problem& p, const Op& op, std::any parameters = {}) {
    const auto reference = [op]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        reference::linear_attention<S>(in, out, op.feature_map, op.pattern, op.normalise, op.eps, op.scale);
    };
    const auto naive = [op](const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) {
        by.linear(in, out, each_number<T>(op.feature_map), shown_by(op.pattern, in.positions), static_cast<T>(op.normalise ? op.eps : -1));
    };
    const auto gradients = [op]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
        reference::linear_gradients<S>(in, given.values, wanted, op.feature_map, op.pattern, op.normalise, op.eps, op.scale);
    };
    made_linear made{op, reference, naive, linear_flops(p), std::move(parameters)};
    const auto terms = [op](const inputs<double>& in, const tensor_view<const double>& given) {
        return linear_terms(in, given, op.feature_map, op.pattern, op.normalise, op.eps, op.scale);
    };
    return made_with_gradients{std::move(made), gradients, terms};
}

bool any_problem(const problem&) { return true; }

const auto dense_case = linear_case(
    "linear", "4 n d_k d_v", []<class T>(const problem& p) { return with_definition<T>(p, attn::linear_attention{}); }, any_problem);

const auto causal_case = linear_case(
    "linear_causal", "4 n d_k d_v",
    []<class T>(const problem& p) { return with_definition<T>(p, attn::linear_attention{.feature_map = relu{}, .pattern = causal{}}); },
    any_problem);

/// Weights of both signs, so without a denominator.
const auto unnormalised_case = linear_case(
    "linear_unnormalised", "4 n d_k d_v",
    []<class T>(const problem& p) {
        return with_definition<T>(
            p, attn::linear_attention{.feature_map = identity_features{}, .pattern = prefix{11}, .normalise = false, .scale = 0.25});
    },
    any_problem);

/// The user's own map, and keys hidden by length: of several batch entries the first sees none.
const auto lengths_case = linear_case(
    "linear_lengths", "4 n d_k d_v",
    []<class T>(const problem& p) {
        auto length = std::make_shared<std::vector<index_t>>();
        for (index_t b = 0; b < p.batch; ++b)
            length->push_back(std::max<index_t>(0, p.positions.first_key[b] + (p.batch == 1 ? 2 * p.keys / 3 : p.keys * b / (p.batch - 1))));
        const auto squares = []<class S>(S x) { return x * x; };
        return with_definition<T>(p, attn::linear_attention{.feature_map = squares, .pattern = lengths{*length}}, length);
    },
    any_problem);

} // namespace

} // namespace attn::testing
