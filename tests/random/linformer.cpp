// Problems of Linformer.
#include "bounds.hpp"
#include "drawn_projection.hpp"
#include "others.hpp"
#include "random_pattern.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/linformer_backward.hpp>
#include <attn/reference/linformer.hpp>

namespace attn::fuzz {

namespace {

tensor<double> without_signs(const tensor<double>& from) {
    return filled<double>(from.shape(), [at = from.data()]() mutable { return std::abs(*at++); });
}
template <Scalar T>
reference::projected_tokens<double> define_magnitudes(projected_by how, const drawn_projection<T>& d, const reference::tokens<double>& x) {
    const auto weights = without_signs(reference::widen(d.weights.view())), bias = without_signs(reference::widen(d.bias.view()));
    return define<double, double>(how, d.projected, weights.view(), d.bias.data() ? bias.view() : tensor_view<const double>(), x);
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
            const auto seen_by = visible.begin() + static_cast<std::ptrdiff_t>(b * m);
            const std::vector<bool> seen(seen_by, seen_by + static_cast<std::ptrdiff_t>(m));
            const auto exact = define<double>(how, d, {own, b, h, seen}), sums = define_magnitudes(how, d, {own_magnitudes, b, h, seen});
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

/// The parameters of one problem.
template <Scalar T>
struct linformer_drawn {
    std::shared_ptr<const pattern_tree> tree;
    drawn_projection<T> keys, values;
    projected_by keys_by = projected_by::matrix, values_by = projected_by::matrix;
    std::optional<double> scale;
    index_t rows = 0;

    random_pattern pattern() const { return {tree.get()}; }
};

/// Linformer with parameters: what is asked of it whatever its projections are.
template <Scalar T>
class drawn_linformer : public operation<T> {
public:
    drawn_linformer(const Attention auto& op, const std::shared_ptr<const linformer_drawn<T>>& drawn) : operation<T>(op), drawn_(drawn) {}

    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        reference::linformer<double>(
            in, out, [&](const auto& x) { return define(drawn_->keys_by, drawn_->keys, x); },
            [&](const auto& x) { return define(drawn_->values_by, drawn_->values, x); }, drawn_->scale, drawn_->pattern());
    }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        std::vector<bool> visible;
        for (index_t b = 0; b < in.keys.shape().batch; ++b)
            for (index_t j = 0; j < in.keys.shape().tokens; ++j)
                visible.push_back(drawn_->pattern().at(b, 0).visible(in.positions.first_query[b], in.positions.first_key[b] + j));
        const auto rows = drawn_->rows;
        const auto keys = project_all(drawn_->keys_by, drawn_->keys, reference::widen(in.keys), visible, rows),
                   values = project_all(drawn_->values_by, drawn_->values, reference::widen(in.values), visible, rows);
        const auto kv_heads = in.keys.shape().heads, group = kv_heads > 0 ? in.queries.shape().heads / kv_heads : 1;
        softmax_terms terms{.scale = drawn_->scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels))), .sees = [&](index_t b, index_t h) {
                                return [&, first = (b * kv_heads + h / group) * rows](index_t, index_t r) -> bool {
                                    const auto at = static_cast<std::size_t>(first + r);
                                    return keys.present[at] && values.present[at];
                                };
                            }};
        terms.key_error = &keys.errors;
        terms.value_error = &values.errors;
        terms.unit = unit_of<T>;
        terms.least = static_cast<double>(std::numeric_limits<T>::min());
        softmax_bounds({in.queries, keys.numbers, values.numbers, {}}, bounds, terms);
    }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> shapes;
        for (const auto* of : {&drawn_->keys, &drawn_->values})
            for (const auto* t : {&of->weights, &of->bias})
                if (t->data()) shapes.push_back(t->shape());
        return shapes;
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        const auto [of_keys, of_values] = named(wanted);
        reference::linformer_gradients<bounded<T>>(
            in, given, wanted, [&](const auto& x) { return define(drawn_->keys_by, drawn_->keys, x); },
            [&](const auto& x) { return define(drawn_->values_by, drawn_->values, x); },
            [&, of = of_keys](const auto& x, const auto& of_rows, const auto& of_x) { define_gradients(drawn_->keys_by, drawn_->keys, x, of_rows, of_x, of); },
            [&, of = of_values](const auto& x, const auto& of_rows, const auto& of_x) { define_gradients(drawn_->values_by, drawn_->values, x, of_rows, of_x, of); },
            drawn_->scale, drawn_->pattern());
    }

protected:
    /// The gradients of weights and bias of either projection, of those that they have.
    template <class U>
    std::pair<std::array<tensor_view<U>, 2>, std::array<tensor_view<U>, 2>> named(const testing::wanted_gradients<U>& wanted) const {
        std::size_t number = 0;
        const auto take = [&](const auto& t) { return t.data() ? wanted.parameter(number++) : tensor_view<U>(); };
        using both = std::array<tensor_view<U>, 2>;
        const both of_keys{take(drawn_->keys.weights), take(drawn_->keys.bias)};
        return {of_keys, both{take(drawn_->values.weights), take(drawn_->values.bias)}};
    }

private:
    std::shared_ptr<const linformer_drawn<T>> drawn_;
};

template <Scalar T, class E, class F>
class linformer_operation final : public operation_of<T, linformer_attention<E, F, random_pattern>, drawn_linformer<T>> {
public:
    using linformer_operation::operation_of::operation_of;

private:
    using all_gradients = typename linformer_attention<E, F, random_pattern>::template gradients<T>;
    all_gradients gradients(const testing::wanted_gradients<T>& wanted) const override {
        all_gradients all;
        static_cast<input_gradients<T>&>(all) = wanted;
        const auto [of_keys, of_values] = this->named(wanted);
        const auto name = [](auto& to, const std::array<tensor_view<T>, 2>& of) {
            if constexpr (requires { to.matrix; }) to = {of[0], of[1]};
            if constexpr (requires { to.weights; }) to = {of[0], of[1]};
        };
        name(all.key_projection, of_keys);
        name(all.value_projection, of_values);
        return all;
    }
};

template <Scalar T, class E, class F>
any_operation<T> linformer_of(const std::shared_ptr<const linformer_drawn<T>>& d, const E& of_keys, const F& of_values) {
    return std::make_unique<linformer_operation<T, E, F>>(
        linformer_attention<E, F, random_pattern>{.key_projection = of_keys, .value_projection = of_values, .scale = d->scale, .pattern = d->pattern()}, d);
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
    const auto own = std::make_shared<linformer_drawn<T>>();
    own->tree = tree;
    own->scale = scale;
    auto& rows = own->rows = random.number(1, std::max<index_t>(2, std::min<index_t>(s.keys, 150)));
    const auto kind = random.number(0, 2);
    if (kind == 0) {
        own->keys_by = own->values_by = projected_by::matrix;
        for (auto* d : {&own->keys, &own->values}) {
            d->weights = filled<T>({1, heads(), rows, s.keys + random.number(0, 3)}, number);
            if (random.one_in(2)) d->bias = filled<T>({1, heads(), rows, 1}, number);
        }
        using matrix = linear_projection<T>;
        t.op = linformer_of<T>(own, own->keys.template as<matrix>(), own->values.template as<matrix>());
    } else if (kind == 1) {
        own->keys_by = projected_by::mean, own->values_by = projected_by::largest;
        own->keys.projected = own->values.projected = rows;
        t.op = linformer_of<T>(own, mean_pooling{rows}, max_pooling{rows});
    } else {
        own->keys_by = projected_by::channels, own->values_by = projected_by::mixing;
        const auto kernel = random.number(1, 9);
        rows = s.keys / kernel;
        own->keys.weights = filled<T>({1, heads(), kernel, s.key_dim}, number);
        own->values.weights = filled<T>({kernel, heads(), s.value_dim, s.value_dim}, number);
        if (random.one_in(2)) own->keys.bias = filled<T>({1, heads(), 1, s.key_dim}, number);
        if (random.one_in(2)) own->values.bias = filled<T>({1, heads(), 1, s.value_dim}, number);
        t.op = linformer_of<T>(own, own->keys.template as<channel_convolution<T>>(), own->values.template as<mixing_convolution<T>>());
    }
    static constexpr const char* names[] = {"matrices", "mean and largest", "convolutions"};
    t.name = std::string(names[kind]) + " to " + std::to_string(rows) + " rows; " + tree->name();
    t.keys_stand_alone = false;
    return t;
}

outcome check_linformer(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_linformer<T>(random); });
}

} // namespace attn::fuzz
