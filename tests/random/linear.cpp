// Problems of linear attention.
#include "linear_bounds.hpp"
#include "others.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/cosformer_features.hpp>
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

/// Linear attention with lengths, which it may refer to.
template <Scalar T, class F, Pattern P>
class linear_operation final : public operation_of<T, linear_attention<F, P>> {
    using linear_operation::operation_of::op_;
    std::shared_ptr<const std::vector<index_t>> lengths_;

public:
    linear_operation(const linear_attention<F, P>& op, const std::shared_ptr<const std::vector<index_t>>& lengths) : linear_operation::operation_of(op), lengths_(lengths) {}

    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        reference::linear_attention<double>(in, out, op_.feature_map, op_.pattern, op_.normalise, op_.eps, op_.scale);
    }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        linear_bounds(in, bounds.values,
                      {.feature = [this](double x) { return static_cast<double>(op_.feature_map(x)); },
                       .sees = reference::detail::visible_pairs(op_.pattern),
                       .normalise = op_.normalise,
                       .eps = op_.eps,
                       .scale = op_.scale,
                       .feature_error = 8 * unit_of<T>, // an exponential and a sum
                       .unit = unit_of<T>,
                       .least = static_cast<double>(std::numeric_limits<T>::min())});
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        reference::linear_gradients<bounded<T>>(in, given.values, wanted, op_.feature_map, op_.pattern, op_.normalise, op_.eps, op_.scale);
    }

private:
    input_gradients<T> gradients(const testing::wanted_gradients<T>& wanted) const override { return wanted; }
};

template <Scalar T, class F, Pattern P>
any_operation<T> linear_of(const linear_attention<F, P>& op, const std::shared_ptr<const std::vector<index_t>>& lengths) {
    return std::make_unique<linear_operation<T, F, P>>(op, lengths);
}

/// What a problem with a map of whole vectors refers to.
template <Scalar T>
struct vector_operands {
    tensor<T> directions;
    std::vector<index_t> lengths;
};
template <Scalar T, VectorFeatureMap F, Pattern P>
class vector_operation final : public operation_of<T, linear_attention<F, P>> {
    static constexpr bool causal_too = std::same_as<P, both<causal, lengths>>;
    using vector_operation::operation_of::op_;
    std::shared_ptr<const vector_operands<T>> operands_;

public:
    vector_operation(const linear_attention<F, P>& op, const std::shared_ptr<const vector_operands<T>>& operands) : vector_operation::operation_of(op), operands_(operands) {}

    void reference(const inputs<double>& in, const outputs<double>& out) const override { define(in, out); }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        write_bounds<T>(in, bounds, [&](const auto& known, const auto& out) { define(known, out); });
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        reference::vector_linear_gradients<bounded<T>>(in, given.values, wanted, op_.feature_map, op_.pattern, causal_too, op_.normalise, op_.eps, op_.scale);
    }

private:
    input_gradients<T> gradients(const testing::wanted_gradients<T>& wanted) const override { return wanted; }
    template <class U>
    void define(const inputs<U>& in, const outputs<U>& out) const {
        reference::vector_linear_attention<U>(in, out, op_.feature_map, op_.pattern, causal_too, op_.normalise, op_.eps, op_.scale);
    }
};

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
    const auto make = [=, channels = t.size.key_dim](index_t batch, index_t batches) -> any_operation<T> {
        auto own = std::make_shared<vector_operands<T>>();
        own->lengths = {length.data() + batch, length.data() + batch + batches};
        if (!is_performer)
            return std::make_unique<vector_operation<T, cosformer_features, both<causal, lengths>>>(linear_attention<cosformer_features, both<causal, lengths>>{.feature_map = {reach}, .pattern = causal{} & lengths{own->lengths}, .eps = eps}, own);
        own->directions = tensor<T>({1, 1, features, channels});
        fill_orthogonal_directions(own->directions.view(), seed);
        return std::make_unique<vector_operation<T, performer_features<T>, lengths>>(linear_attention<performer_features<T>, lengths>{.feature_map = {own->directions}, .pattern = {own->lengths}, .eps = eps}, own);
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
    const auto make = [=](index_t batch, index_t batches) -> any_operation<T> {
        const auto own = std::make_shared<const std::vector<index_t>>(length->data() + batch, length->data() + batch + batches);
        switch (kind) {
        case 0:
            return linear_of<T>(linear_attention<>{.eps = eps}, own);
        case 1:
            return linear_of<T>(linear_attention<relu, causal>{.eps = eps}, own);
        case 2:
            return linear_of<T>(linear_attention<elu_plus_one, both<causal, lengths>>{.pattern = causal{} & lengths{*own}, .eps = eps}, own);
        case 3:
            return linear_of<T>(linear_attention<squares, lengths>{.pattern = {*own}, .eps = eps}, own);
        default:
            return linear_of<T>(
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
