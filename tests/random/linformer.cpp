// Problems of Linformer.
#include "bounds.hpp"
#include "operators.hpp"
#include "random_pattern.hpp"

#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/reference/linformer.hpp>
#include <attn/reference/widen.hpp>

namespace attn::fuzz {

namespace {

/// A projection's parameters, and those in double, as they are or without signs.
template <Scalar T>
struct drawn_projection {
    tensor<T> weights, bias; ///< bias: without memory for none
    index_t projected = 0;

    tensor_view<const T> bias_view() const { return bias.data() ? bias.view() : tensor_view<const T>(); }
};

tensor<double> without_signs(const tensor<double>& from) {
    return filled<double>(from.shape(), [at = from.data()]() mutable { return std::abs(*at++); });
}
template <Scalar T>
tensor<double> widened(const tensor<T>& from, bool magnitudes) {
    auto wide = reference::widen(from.view());
    return magnitudes ? without_signs(wide) : std::move(wide);
}

/// The definitions: the projected rows, and how many roundings each took.
enum class projected_by { matrix, mean, largest, channels, mixing };

template <Scalar T>
reference::projected_tokens<double> define(projected_by how, const drawn_projection<T>& d, const reference::tokens<double>& x, bool magnitudes) {
    const auto weights = widened(d.weights, magnitudes), bias = widened(d.bias, magnitudes);
    const tensor_view<const double> w = weights.view(), b = d.bias.data() ? bias.view() : tensor_view<const double>();
    switch (how) {
    case projected_by::matrix:
        return reference::linear_projection(x, w, b);
    case projected_by::mean:
        return reference::mean_pooling(x, d.projected);
    case projected_by::largest:
        return reference::max_pooling(x, d.projected);
    case projected_by::channels:
        return reference::channel_convolution(x, w, b);
    default:
        return reference::mixing_convolution(x, w, b);
    }
}
template <Scalar T>
double roundings(projected_by how, const drawn_projection<T>& d, index_t tokens, index_t channels) {
    if (how == projected_by::largest) return 0;
    if (how == projected_by::channels) return static_cast<double>(d.weights.shape().tokens + 4);
    if (how == projected_by::mixing) return static_cast<double>(d.weights.shape().batch * channels + 4);
    return static_cast<double>(tokens + 4);
}

/// Projected tokens of all heads, with their errors; a row that has no token is not there.
struct projected_tensor {
    tensor<double> numbers, errors;
    std::vector<bool> present;
};

template <Scalar T>
projected_tensor project_all(projected_by how, const drawn_projection<T>& d, const tensor<double>& x, const std::vector<bool>& visible, index_t rows) {
    const auto [batch, heads, m, channels] = x.shape();
    projected_tensor to{tensor<double>({batch, heads, rows, channels}), tensor<double>({batch, heads, rows, channels}),
                        std::vector<bool>(static_cast<std::size_t>(batch * heads * rows))};
    const auto magnitudes = without_signs(x);
    const tensor_view<const double> own = x.view(), own_magnitudes = magnitudes.view();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const std::vector<bool> seen(visible.begin() + b * m, visible.begin() + (b + 1) * m);
            const auto exact = define(how, d, {own, b, h, seen}, false), sums = define(how, d, {own_magnitudes, b, h, seen}, true);
            for (std::size_t r = 0; r < exact.size(); ++r) {
                if (!exact[r]) continue;
                to.present[static_cast<std::size_t>((b * heads + h) * rows) + r] = true;
                for (index_t c = 0; c < channels; ++c) {
                    const auto at = static_cast<std::size_t>(c);
                    to.numbers(b, h, static_cast<index_t>(r), c) = (*exact[r])[at];
                    to.errors(b, h, static_cast<index_t>(r), c) = unit_of<T> * roundings(how, d, m, channels) * (*sums[r])[at];
                }
            }
        }
    return to;
}

template <Scalar T, class E, class F>
struct linformer_owner {
    std::shared_ptr<const pattern_tree> tree;
    drawn_projection<T> keys, values;
    projected_by keys_by, values_by;
    std::optional<linformer_attention<E, F, random_pattern>> op = {};
};

template <Scalar T, class E, class F>
operation<T> linformer_operation(const std::shared_ptr<const linformer_owner<T, E, F>>& own, index_t rows) {
    using op_type = linformer_attention<E, F, random_pattern>;
    auto result = operation_of<T>(std::shared_ptr<const op_type>(own, &*own->op));
    result.reference = [own](const inputs<double>& in, const outputs<double>& out) {
        reference::linformer<double>(
            in, out, [&](const reference::tokens<double>& x) { return define(own->keys_by, own->keys, x, false); },
            [&](const reference::tokens<double>& x) { return define(own->values_by, own->values, x, false); }, own->op->scale, own->op->pattern);
    };
    result.bounds = [own, rows](const inputs<T>& in, const outputs<double>& bounds) {
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
        std::vector<bool> visible;
        for (index_t b = 0; b < k.shape().batch; ++b)
            for (index_t j = 0; j < k.shape().tokens; ++j)
                visible.push_back(attn::at(own->op->pattern, b, 0).visible(in.positions.first_query[b], in.positions.first_key[b] + j));
        const auto keys = project_all(own->keys_by, own->keys, k, visible, rows), values = project_all(own->values_by, own->values, v, visible, rows);
        const auto kv_heads = k.shape().heads, group = kv_heads > 0 ? q.shape().heads / kv_heads : 1;
        softmax_terms terms{.scale = own->op->scale.value_or(1 / std::sqrt(static_cast<double>(q.shape().channels))),
                            .sees = [&](index_t b, index_t h, index_t, index_t r) -> bool {
                                const auto at = static_cast<std::size_t>((b * kv_heads + h / group) * rows + r);
                                return keys.present[at] && values.present[at];
                            }};
        terms.key_error = &keys.errors;
        terms.value_error = &values.errors;
        terms.unit = unit_of<T>;
        terms.least = static_cast<double>(std::numeric_limits<T>::min());
        softmax_bounds({q, keys.numbers, values.numbers, {}}, bounds, terms);
    };
    return result;
}

} // namespace

template <Scalar T>
trial<T> draw_linformer(draw& random) {
    trial<T> t;
    auto& s = t.size = draw_sizes(random);
    draw_positions(random, s);
    t.in = draw_given<T>(random, s, random.one_in(6) ? numbers::peaked : numbers::usual);
    const auto tree = draw_pattern(random, s, pattern_kind::of_keys);
    const auto number = [&] { return random.real(-1, 1); };
    const auto heads = [&] { return random.one_in(2) ? std::max<index_t>(1, s.kv_heads) : 1; };
    const std::optional<double> scale = random.one_in(4) ? std::optional(random.real(-1, 1)) : std::nullopt;
    index_t rows = random.number(1, std::max<index_t>(2, std::min<index_t>(s.keys, 150)));
    const auto kind = random.number(0, 2);
    if (kind == 0) {
        using matrix = linear_projection<T>;
        auto own = std::make_shared<linformer_owner<T, matrix, matrix>>();
        own->keys_by = own->values_by = projected_by::matrix;
        for (auto* d : {&own->keys, &own->values}) {
            d->weights = filled<T>({1, heads(), rows, s.keys + random.number(0, 3)}, number);
            if (random.one_in(2)) d->bias = filled<T>({1, heads(), rows, 1}, number);
        }
        own->tree = tree;
        own->op.emplace(linformer_attention<matrix, matrix, random_pattern>{.key_projection = {own->keys.weights.view(), own->keys.bias_view()},
                                                                            .value_projection = {own->values.weights.view(), own->values.bias_view()},
                                                                            .scale = scale,
                                                                            .pattern = {tree.get()}});
        t.op = linformer_operation<T, matrix, matrix>(own, rows);
    } else if (kind == 1) {
        auto own = std::make_shared<linformer_owner<T, mean_pooling<>, max_pooling<>>>();
        own->keys_by = projected_by::mean, own->values_by = projected_by::largest;
        own->keys.projected = own->values.projected = rows;
        own->tree = tree;
        own->op.emplace(linformer_attention<mean_pooling<>, max_pooling<>, random_pattern>{
            .key_projection = {rows}, .value_projection = {rows}, .scale = scale, .pattern = {tree.get()}});
        t.op = linformer_operation<T, mean_pooling<>, max_pooling<>>(own, rows);
    } else {
        using channels = channel_convolution<T>;
        using mixing = mixing_convolution<T>;
        auto own = std::make_shared<linformer_owner<T, channels, mixing>>();
        own->keys_by = projected_by::channels, own->values_by = projected_by::mixing;
        const auto kernel = random.number(1, 9);
        rows = s.keys / kernel;
        own->keys.weights = filled<T>({1, heads(), kernel, s.key_dim}, number);
        own->values.weights = filled<T>({kernel, heads(), s.value_dim, s.value_dim}, number);
        if (random.one_in(2)) own->keys.bias = filled<T>({1, heads(), 1, s.key_dim}, number);
        if (random.one_in(2)) own->values.bias = filled<T>({1, heads(), 1, s.value_dim}, number);
        own->tree = tree;
        own->op.emplace(linformer_attention<channels, mixing, random_pattern>{.key_projection = {own->keys.weights.view(), own->keys.bias_view()},
                                                                              .value_projection = {own->values.weights.view(), own->values.bias_view()},
                                                                              .scale = scale,
                                                                              .pattern = {tree.get()}});
        t.op = linformer_operation<T, channels, mixing>(own, rows);
    }
    static constexpr const char* names[] = {"matrices", "mean and largest", "convolutions"};
    t.name = std::string(names[kind]) + " to " + std::to_string(rows) + " rows; " + tree->name();
    t.keys_stand_alone = false;
    return t;
}

template trial<float> draw_linformer(draw&);
template trial<double> draw_linformer(draw&);

} // namespace attn::fuzz
