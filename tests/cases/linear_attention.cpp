#include "linear_case.hpp"

#include "attn/attention/cosformer_features.hpp"
#include "attn/attention/linear_attention.hpp"
#include "attn/attention/linear_backward.hpp"
#include "attn/attention/performer_features.hpp"
#include "attn/attention/random_projection.hpp"
#include "attn/reference/linear_attention.hpp"
#include "attn/reference/vector_linear_attention.hpp"

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

/// Whether queries may see different keys.
template <class Op>
constexpr bool sees_by_query(const Op& op) {
    return kernel::linear_order<float, std::remove_cvref_t<decltype(op.pattern)>>::causal;
}
/// A map of whole vectors: of the slow forms, its definition in the operator's precision.
template <class Op>
auto with_vector_definition(const problem& p, const Op& op, std::any parameters = {}) {
    const auto reference = [op]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        reference::vector_linear_attention<S>(in, out, op.feature_map, op.pattern, sees_by_query(op), op.normalise, op.eps, op.scale);
    };
    const auto naive = [=](const auto&, const auto& in, const auto& out) { reference(in, out); };
    const auto gradients = [op]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
        reference::vector_linear_gradients<S>(in, given.values, wanted, op.feature_map, op.pattern, sees_by_query(op), op.normalise, op.eps, op.scale);
    };
    auto features = p;
    features.key_dim = op.feature_map.features(p.key_dim);
    made_linear made{op, reference, naive, linear_flops(features), std::move(parameters)};
    // The sums of features' terms, and of those as many as a channel makes of cosFormer's features.
    const auto terms = [op](const inputs<double>& in, const tensor_view<const double>& given) {
        using map = decltype(op.feature_map);
        const auto f = reference::detail::vectors_of<double, map>{op.feature_map, in.queries, in.positions.first_query}.features(),
                   e = reference::detail::vectors_of<double, map>{op.feature_map, in.keys, in.positions.first_key}.features();
        auto sums = linear_terms({f, e, in.values, in.positions}, given, identity_features{}, op.pattern, op.normalise, op.eps, op.scale);
        sums[0] *= 2, sums[1] *= 2;
        return sums;
    };
    // Performer's maxima are constants to its gradient, which differences would not say: tests/attention_vector_features.cpp has it.
    if constexpr (requires { op.feature_map.maximum(std::span<const double>()); }) return made;
    else return made_with_gradients{std::move(made), gradients, terms};
}

/// The largest of the keys is that of those that are seen.
const auto performer_case = linear_case(
    "linear_performer", "4 n r d_v + 4 n r d_k, r = 2 d_k",
    []<class T>(const problem& p) {
        struct owned {
            tensor<T> directions;
            std::vector<index_t> length;
        };
        const auto own = std::make_shared<owned>(owned{tensor<T>({1, 1, 2 * p.key_dim, p.key_dim}), {}});
        fill_orthogonal_directions(own->directions.view(), 3);
        for (index_t b = 0; b < p.batch; ++b) own->length.push_back(std::max<index_t>(0, p.positions.first_key[b] + p.keys - p.keys * b / 5));
        return with_vector_definition(
            p, attn::linear_attention{.feature_map = performer_features{own->directions}, .pattern = lengths{own->length}}, own);
    },
    any_problem);

const auto cosformer_case = linear_case(
    "linear_cosformer_causal", "8 n d_k d_v",
    []<class T>(const problem& p) {
        return with_vector_definition(p, attn::linear_attention{.feature_map = cosformer_features{.length = 10000}, .pattern = causal{}});
    },
    any_problem);

} // namespace

} // namespace attn::testing
