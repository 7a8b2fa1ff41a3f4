// Problems of linear attention.
#include "linear_bounds.hpp"
#include "others.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/number.hpp>

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

} // namespace

template <Scalar T>
trial<T> draw_linear(draw& random) {
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
        const auto own = std::make_shared<const std::vector<index_t>>(length->begin() + batch, length->begin() + batch + batches);
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
