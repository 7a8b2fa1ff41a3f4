// Problems of linear attention.
#include "linear_bounds.hpp"
#include "others.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/performer_features.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/number.hpp>
#include <attn/reference/vector_linear_attention.hpp>

namespace attn::fuzz {

using namespace pattern;

namespace {

struct squares {
    template <class S>
    S operator()(S x) const {
        return x * x;
    }
};

template <Scalar T, class F, Pattern P>
operation<T> linear_operation(const linear_attention<F, P>& op, const std::shared_ptr<const std::vector<index_t>>& lengths) {
    using op_type = linear_attention<F, P>;
    struct owner {
        op_type op;
        std::shared_ptr<const std::vector<index_t>> lengths;
    };
    const auto own = std::make_shared<const owner>(owner{op, lengths});
    auto result = operation_of<T>(std::shared_ptr<const op_type>(own, &own->op));
    result.reference = [own](const inputs<double>& in, const outputs<double>& out) {
        reference::linear_attention<double>(in, out, own->op.feature_map, own->op.pattern, own->op.normalise, own->op.eps, own->op.scale);
    };
    const linear_terms terms{.feature = [own](double x) { return static_cast<double>(own->op.feature_map(x)); },
                             .sees = [own](index_t b, index_t h, index_t i, index_t j) -> bool { return attn::at(own->op.pattern, b, h).visible(i, j); },
                             .normalise = op.normalise,
                             .eps = op.eps,
                             .scale = op.scale,
                             .feature_error = 8 * unit_of<T>, // an exponential and a sum
                             .unit = unit_of<T>,
                             .least = static_cast<double>(std::numeric_limits<T>::min())};
    const auto widened = [](const inputs<T>& in, const auto& then) {
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
        then(inputs<double>{q, k, v, in.positions});
    };
    result.bounds = [=](const inputs<T>& in, const outputs<double>& bounds) {
        widened(in, [&](const inputs<double>& wide) { linear_bounds(wide, bounds.values, terms); });
    };
    result.backward = [own](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const testing::wanted_gradients<T>& wanted,
                            const execution& run) { attn::backward(own->op, in, saved, given, wanted, run); };
    result.backward_workspace_bytes = [own](const input_shapes& s, index_t concurrency) { return own->op.template backward_workspace_bytes<T>(s, concurrency); };
    result.parameter_shapes = [](const input_shapes&) { return std::vector<shape>(); };
    result.reference_gradients = [own](const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given,
                                       const testing::wanted_gradients<bounded<T>>& wanted) {
        reference::linear_gradients<bounded<T>>(in, given.values, wanted, own->op.feature_map, own->op.pattern, own->op.normalise, own->op.eps, own->op.scale);
    };
    return result;
}

/// What a problem with a map of whole vectors refers to.
template <Scalar T>
struct vector_operands {
    tensor<T> directions;
    std::vector<index_t> lengths;
};
template <Scalar T, VectorFeatureMap F, Pattern P>
operation<T> vector_operation(const linear_attention<F, P>& op, const std::shared_ptr<const vector_operands<T>>& operands) {
    using op_type = linear_attention<F, P>;
    struct owner {
        op_type op;
        std::shared_ptr<const vector_operands<T>> operands;
    };
    const auto own = std::make_shared<const owner>(owner{op, operands});
    constexpr bool causal_too = std::same_as<P, both<causal, lengths>>;
    auto result = operation_of<T>(std::shared_ptr<const op_type>(own, &own->op));
    result.reference = [own](const inputs<double>& in, const outputs<double>& out) {
        reference::vector_linear_attention<double>(in, out, own->op.feature_map, own->op.pattern, causal_too, own->op.normalise, own->op.eps, own->op.scale);
    };
    result.bounds = [own](const inputs<T>& in, const outputs<double>& bounds) {
        const auto wide = [](const auto& from) {
            tensor<bounded<T>> to(from.shape());
            attn::detail::for_each_number(from.shape(), [&](index_t b, index_t h, index_t i, index_t c) { to(b, h, i, c) = static_cast<double>(from(b, h, i, c)); });
            return to;
        };
        const auto q = wide(in.queries), k = wide(in.keys), v = wide(in.values);
        tensor<bounded<T>> out(bounds.values.shape());
        reference::vector_linear_attention<bounded<T>>({q, k, v, in.positions}, outputs<bounded<T>>{out}, own->op.feature_map, own->op.pattern, causal_too, own->op.normalise,
                                                       own->op.eps, own->op.scale);
        attn::detail::for_each_number(out.shape(), [&](index_t b, index_t h, index_t i, index_t c) { bounds.values(b, h, i, c) = out(b, h, i, c).error(); });
    };
    result.backward = [own](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const testing::wanted_gradients<T>& wanted,
                            const execution& run) { attn::backward(own->op, in, saved, given, wanted, run); };
    result.backward_workspace_bytes = [own](const input_shapes& s, index_t concurrency) { return own->op.template backward_workspace_bytes<T>(s, concurrency); };
    result.parameter_shapes = [](const input_shapes&) { return std::vector<shape>(); };
    result.reference_gradients = [own](const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given,
                                       const testing::wanted_gradients<bounded<T>>& wanted) {
        reference::vector_linear_gradients<bounded<T>>(in, given.values, wanted, own->op.feature_map, own->op.pattern, causal_too, own->op.normalise, own->op.eps,
                                                       own->op.scale);
    };
    return result;
}

} // namespace

/// Performer's features of what lengths show, cosFormer's of what is seen of it from behind.
template <Scalar T>
trial<T> draw_linear_vectors(draw& random) {
    trial<T> t;
    t.size = draw_sizes(random);
    draw_positions(random, t.size);
    t.in = draw_given<T>(random, t.size, numbers::usual);
    std::vector<index_t> length;
    for (index_t b = 0; b < t.size.batch; ++b) length.push_back(std::max<index_t>(0, sizes::lowest(t.size.first_key) + random.number(0, t.size.keys)));
    const bool is_performer = random.one_in(2);
    const auto features = 1 + random.size(80), reach = random.number(t.size.keys + t.size.queries + 1, 100000);
    const auto seed = static_cast<std::uint64_t>(random.number(0, 1000));
    const auto eps = random.one_in(3) ? random.real(1e-3, 1) : 1e-6;
    const auto make = [=, channels = t.size.key_dim](index_t batch, index_t batches) -> operation<T> {
        auto own = std::make_shared<vector_operands<T>>();
        own->lengths = {length.data() + batch, length.data() + batch + batches};
        if (!is_performer)
            return vector_operation<T>(linear_attention<cosformer_features, both<causal, lengths>>{.feature_map = {reach}, .pattern = causal{} & lengths{own->lengths}, .eps = eps}, own);
        own->directions = tensor<T>({1, 1, features, channels});
        fill_orthogonal_directions(own->directions.view(), seed);
        return vector_operation<T>(linear_attention<performer_features<T>, lengths>{.feature_map = {own->directions}, .pattern = {own->lengths}, .eps = eps}, own);
    };
    t.name = is_performer ? "performer, " + std::to_string(features) + " features, lengths" : "cosformer " + std::to_string(reach) + ", causal & lengths";
    t.op = make(0, t.size.batch);
    t.part = [make](index_t b, index_t) { return make(b, 1); };
    return t;
}

template <Scalar T>
trial<T> draw_linear(draw& random) {
    if (random.one_in(4)) return draw_linear_vectors<T>(random);
    trial<T> t;
    t.size = draw_sizes(random);
    draw_positions(random, t.size);
    const auto kind = random.number(0, 4);
    t.in = draw_given<T>(random, t.size, random.one_in(8) ? numbers::equal : numbers::usual);
    const auto to_a_key = [&] { return std::max<index_t>(0, sizes::lowest(t.size.first_key) + random.number(0, t.size.keys)); };
    auto length = std::make_shared<std::vector<index_t>>();
    for (index_t b = 0; b < t.size.batch; ++b) length->push_back(to_a_key());
    const auto ahead = to_a_key();
    const auto eps = random.one_in(3) ? random.real(1e-3, 1) : 1e-6;
    const auto make = [=](index_t batch, index_t batches) -> operation<T> {
        const auto own = std::make_shared<const std::vector<index_t>>(length->data() + batch, length->data() + batch + batches);
        switch (kind) {
        case 0:
            return linear_operation<T>(linear_attention<>{.eps = eps}, own);
        case 1:
            return linear_operation<T>(linear_attention<relu, causal>{.eps = eps}, own);
        case 2:
            return linear_operation<T>(linear_attention<elu_plus_one, both<causal, lengths>>{.pattern = causal{} & lengths{*own}, .eps = eps}, own);
        case 3:
            return linear_operation<T>(linear_attention<squares, lengths>{.pattern = {*own}, .eps = eps}, own);
        default:
            return linear_operation<T>(
                linear_attention<identity_features, prefix>{.pattern = {ahead}, .normalise = false, .scale = eps}, own);
        }
    };
    static constexpr const char* names[] = {"elu + 1", "relu, causal", "elu + 1, causal & lengths", "squares, lengths",
                                            "identity, not normalised, prefix "};
    t.name = names[kind] + (kind == 4 ? std::to_string(ahead) : std::string());
    t.op = make(0, t.size.batch);
    t.part = [make](index_t b, index_t) { return make(b, 1); };
    return t;
}

outcome check_linear(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_linear<T>(random); });
}

} // namespace attn::fuzz
