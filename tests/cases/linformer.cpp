#include "../answers.hpp"
#include "case.hpp"

#include "attn/attention/linformer_attention.hpp"
#include "attn/attention/linformer_backward.hpp"
#include "attn/attention/pooling.hpp"
#include "attn/attention/strided_convolution.hpp"
#include "attn/pattern/lengths.hpp"
#include "attn/pattern/predicate.hpp"
#include "attn/reference/linformer.hpp"

#include <array>

namespace attn::testing {

using namespace pattern;

namespace {

/// An operator, its projections' definitions, which have a member `gradients(tokens, gradients of rows, gradients of the tokens, of the
/// parameters)` beside the call, what they refer to, and the operations of projecting one number of a visible token of a head
/// of so many channels.
template <class Op, class E, class F, class Operations>
struct parts {
    Op op;
    E define_keys;
    F define_values;
    Operations operations;
    std::any parameters;
};

/// Calls f(view) for the parameters that a projection has.
template <class P>
void for_each_parameter(const P& p, const auto& f) {
    const auto call = [&](const auto& view) {
        if (view.data()) f(view);
    };
    if constexpr (requires { p.each; }) {
        for (const auto& own : p.each) for_each_parameter(own, f);
    } else if constexpr (requires { p.matrix; }) {
        call(p.matrix);
        call(p.bias);
    } else if constexpr (requires { p.weights; }) {
        call(p.weights);
        call(p.bias);
    }
}

/// The gradients of a projection, by name, of those of a case from a number on; without allocating.
template <Scalar T, class P>
struct named_gradients {
    typename P::template gradients<T> all;

    named_gradients(const P& p, const wanted_gradients<T>& wanted, std::size_t& number) {
        const auto take = [&](const auto& parameter) { return parameter.data() ? wanted.parameter(number++) : tensor_view<T>{}; };
        if constexpr (requires { p.matrix; }) all = {take(p.matrix), take(p.bias)};
        if constexpr (requires { p.weights; }) all = {take(p.weights), take(p.bias)};
    }
};
template <Scalar T, class P>
struct named_gradients<T, projection_per_head<P>> {
    std::array<typename P::template gradients<T>, 64> memory;
    typename projection_per_head<P>::template gradients<T> all;

    named_gradients(const projection_per_head<P>& p, const wanted_gradients<T>& wanted, std::size_t& number) {
        for (std::size_t h = 0; h < p.each.size(); ++h) memory.at(h) = named_gradients<T, P>(p.each[h], wanted, number).all;
        all.each = {memory.data(), p.each.size()};
    }
};

template <Scalar T, class Parts>
class linformer_instance final : public instance<T> {
public:
    explicit linformer_instance(Parts p) : parts_(std::move(p)) {}

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op(), in, out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return op().output_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        reference::linformer<double>(in, out, parts_.define_keys, parts_.define_values, op().scale, op().pattern);
    }
    void plain(const inputs<T>& in, const outputs<T>& out) const override {
        reference::linformer<T>(in, out, parts_.define_keys, parts_.define_values, op().scale, op().pattern);
    }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override {
        if constexpr (requires { parts_.define_keys.matrix; }) return naive_linear(by, in, out);
        plain(in, out);
    }
    bool has_gradient() const override { return true; }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> shapes;
        const auto push = [&](const auto& parameter) { shapes.push_back(parameter.shape()); };
        for_each_parameter(op().key_projection, push);
        if constexpr (!shares) for_each_parameter(op().value_projection, push);
        return shapes;
    }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op().template backward_workspace_bytes<T>(s, concurrency);
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        std::size_t number = 0;
        const named_gradients<T, decltype(Op::key_projection)> of_keys(op().key_projection, wanted, number);
        gradients_of<Op, T> g;
        static_cast<input_gradients<T>&>(g) = wanted;
        g.key_projection = of_keys.all;
        if constexpr (shares) return attn::backward(op(), in, saved, given, g, run);
        else {
            const named_gradients<T, decltype(Op::value_projection)> of_values(op().value_projection, wanted, number);
            g.value_projection = of_values.all;
            attn::backward(op(), in, saved, given, g, run);
        }
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& given, const wanted_gradients<double>& wanted) const override {
        define(in, given, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& given, const wanted_gradients<T>& wanted) const override {
        define(in, given, wanted);
    }

    /// Those of the parameters: products of tokens with the terms of the gradients of projected rows, in which dO . v and its mean cancel.
    std::vector<double> gradient_terms(const inputs<double>& in, const output_gradients<double>& given) const override {
        std::vector<tensor<double>> terms;
        for (const auto& s : parameter_shapes(shapes_of(in))) {
            terms.emplace_back(s);
            std::fill_n(terms.back().data(), s.size(), 0.0);
        }
        std::vector<tensor_view<double>> all(terms.begin(), terms.end());
        const auto of_keys = parameters_of_keys();
        all.resize(terms.size() + most_parameters);
        const auto sizes = [](const tensor_view<const double>& t) {
            auto copy = reference::widen(t);
            for (auto& x : std::span(copy.data(), static_cast<std::size_t>(copy.shape().size()))) x = std::abs(x);
            return copy;
        };
        const auto key_sizes = sizes(in.keys), value_sizes = sizes(in.values);
        const tensor_view<const double> keys = key_sizes, values = value_sizes;
        for (index_t b = 0; b < in.keys.shape().batch; ++b)
            for (index_t g = 0; g < in.keys.shape().heads; ++g) {
                const auto visible = reference::visible_tokens(in, op().pattern, b, g);
                auto of_k = parts_.define_keys(reference::tokens<double>{in.keys, b, g, visible});
                auto of_v = parts_.define_values(reference::tokens<double>{in.values, b, g, visible});
                find_row_terms(in, given, b, g, of_k, of_v);
                const auto add = [&](const auto& definition, const tensor_view<const double>& x, const auto& rows, std::size_t first) {
                    tensor<double> of_x({1, 1, x.shape().tokens, x.shape().channels});
                    std::fill_n(of_x.data(), of_x.shape().size(), 0.0);
                    definition.gradients(reference::tokens<double>{x, b, g, visible}, rows, of_x.view(), std::span<const tensor_view<double>>(all).subspan(first));
                };
                add(parts_.define_keys, keys, of_k, 0);
                add(parts_.define_values, values, of_v, shares ? 0 : of_keys);
            }
        std::vector<double> largest(3);
        for (const auto& t : terms) largest.push_back(largest_magnitude(t));
        return largest;
    }

    double useful_flops(const problem& p) const override {
        double flops = 0;
        const auto channels = p.key_dim + p.value_dim;
        for (index_t b = 0; b < p.batch; ++b)
            for (index_t g = 0; g < p.kv_heads; ++g) {
                index_t seen = 0;
                for (index_t j = 0; j < p.keys && p.queries > 0; ++j)
                    seen +=
                        at(op().pattern, b, g * (p.heads / p.kv_heads)).visible(p.positions.first_query[b], p.positions.first_key[b] + j);
                const auto rows = op().key_projection.size(g, p.keys);
                flops += 2.0 * static_cast<double>(p.heads / p.kv_heads * p.queries * rows * channels);
                flops += parts_.operations(rows, channels / 2) * static_cast<double>(seen * channels);
            }
        return flops;
    }

private:
    using Op = decltype(Parts::op);
    static constexpr bool shares = std::same_as<decltype(Op::value_projection), shared_projection>;

    const auto& op() const { return parts_.op; }

    static constexpr std::size_t most_parameters = 64;

    std::size_t parameters_of_keys() const {
        std::size_t count = 0;
        for_each_parameter(op().key_projection, [&](const auto&) { ++count; });
        return count;
    }
    /// Projected rows become the terms of their gradients: of a key scale P (|dO| . |v| + sum_j P_j |dO| . |v_j|) |q|, of a value P |dO|.
    void find_row_terms(const inputs<double>& in, const output_gradients<double>& given, index_t b, index_t g, reference::projected_tokens<double>& keys,
                        reference::projected_tokens<double>& values) const {
        const auto [batch, heads, n, d_k] = in.queries.shape();
        const auto group = heads / in.keys.shape().heads, d_v = in.values.shape().channels;
        const auto scale = op().scale.value_or(1 / std::sqrt(static_cast<double>(d_k)));
        const auto k = keys, v = values;
        for (auto* rows : {&keys, &values})
            for (auto& row : *rows)
                if (row) std::ranges::fill(*row, 0.0);
        for (auto h = g * group; h < (g + 1) * group; ++h)
            for (index_t i = 0; i < n; ++i) {
                std::vector<double> weight(k.size()), size(k.size());
                double largest = -std::numeric_limits<double>::infinity(), sum = 0, mean = 0;
                const auto for_each = [&](const auto& f) {
                    for (std::size_t r = 0; r < k.size(); ++r)
                        if (k[r] && v[r]) f(r);
                };
                for_each([&](std::size_t r) {
                    for (index_t c = 0; c < d_k; ++c) weight[r] += scale * in.queries(b, h, i, c) * (*k[r])[static_cast<std::size_t>(c)];
                    for (index_t c = 0; c < d_v; ++c) size[r] += std::abs(given.values(b, h, i, c) * (*v[r])[static_cast<std::size_t>(c)]);
                    largest = std::max(largest, weight[r]);
                });
                for_each([&](std::size_t r) { sum += weight[r] = std::exp(weight[r] - largest); });
                for_each([&](std::size_t r) { mean += weight[r] / sum * size[r]; });
                for_each([&](std::size_t r) {
                    const auto p = weight[r] / sum;
                    for (index_t c = 0; c < d_k; ++c) (*keys[r])[static_cast<std::size_t>(c)] += std::abs(scale * in.queries(b, h, i, c)) * p * (size[r] + mean);
                    for (index_t c = 0; c < d_v; ++c) (*values[r])[static_cast<std::size_t>(c)] += std::abs(given.values(b, h, i, c)) * p;
                });
            }
    }
    template <class U>
    void define(const inputs<U>& in, const output_gradients<U>& given, const wanted_gradients<U>& wanted) const {
        const auto of_keys = parameters_of_keys();
        auto all = wanted.parameters;
        all.resize(all.size() + most_parameters);
        for (const auto& view : all)
            if (view.data()) std::fill_n(view.data(), view.shape().size(), U{0});
        const std::span<const tensor_view<U>> keys(all), values = shares ? keys : keys.subspan(of_keys);
        reference::linformer_gradients<U>(
            in, given, wanted, parts_.define_keys, parts_.define_values,
            [&](const auto& x, const auto& rows, const auto& of_x) { parts_.define_keys.gradients(x, rows, of_x, keys); },
            [&](const auto& x, const auto& rows, const auto& of_x) { parts_.define_values.gradients(x, rows, of_x, values); }, op().scale, op().pattern);
    }

    /// For one matrix that serves all heads.
    void naive_linear(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const {
        const auto keys = by.projection(parts_.define_keys.matrix, in.keys),
                   values = by.projection(parts_.define_values.matrix, in.values);
        const auto scale = op().scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        by.softmax({in.queries, keys, values}, out, static_cast<T>(scale), {}, {});
    }

    Parts parts_;
};

/// Registers a case from make.template operator()<T>(problem), which returns parts.
template <class Make>
registered linformer_case(std::string name, std::string cost, Make make) {
    const auto build = [make]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> {
        auto m = make.template operator()<T>(p);
        return std::make_unique<linformer_instance<T, decltype(m)>>(std::move(m));
    };
    return registered({.name = std::move(name),
                       .cost = std::move(cost),
                       .supports = [](const problem&) { return true; }},
                      build);
}

/// How many rows a problem's keys are projected to: few, odd and more than keys where a problem is small.
index_t projected_size(const problem& p) { return p.keys >= 512 ? 256 : 1 + (p.keys * 5 / 8 + p.key_dim) % 67; }

template <class T>
std::shared_ptr<tensor<T>> random_parameter(const shape& s, unsigned seed, double deviation) {
    auto t = std::make_shared<tensor<T>>(s);
    std::mt19937 random(seed);
    std::generate_n(t->data(), s.size(), [&] { return static_cast<T>(testing::random_parameter(random, deviation)); });
    return t;
}

/// The matrix of a learned projection, N(0, 1 / projected).
template <class T>
std::shared_ptr<tensor<T>> random_matrix(const problem& p, index_t heads, index_t rows, unsigned seed) {
    return random_parameter<T>({1, heads, rows, p.keys + 3}, seed, 1 / std::sqrt(static_cast<double>(rows)));
}

/// The definition of a linear projection.
template <class T>
struct linear_definition {
    tensor_view<const T> matrix, bias;

    template <Scalar U>
    auto operator()(const reference::tokens<U>& x) const {
        return reference::linear_projection(x, matrix, bias);
    }
    template <Scalar U>
    void gradients(const reference::tokens<U>& x, const reference::projected_tokens<U>& rows, const tensor_view<U>& of_x, std::span<const tensor_view<U>> of) const {
        reference::linear_projection_gradients(x, rows, of_x, matrix, of[0], bias.data() ? of[1] : tensor_view<U>{});
    }
};

/// Of pooling: max_pooling if `largest`.
template <bool largest>
struct pooling_definition {
    index_t rows;

    template <Scalar U>
    auto operator()(const reference::tokens<U>& x) const {
        return largest ? reference::max_pooling(x, rows) : reference::mean_pooling(x, rows);
    }
    template <Scalar U>
    void gradients(const reference::tokens<U>& x, const reference::projected_tokens<U>& given, const tensor_view<U>& of_x, std::span<const tensor_view<U>>) const {
        largest ? reference::max_pooling_gradients(x, given, of_x) : reference::mean_pooling_gradients(x, given, of_x);
    }
};

/// Of a convolution of each channel, and of one that mixes them.
template <class T>
struct channel_definition {
    tensor_view<const T> weights, bias;

    template <Scalar U>
    auto operator()(const reference::tokens<U>& x) const {
        return reference::channel_convolution(x, weights, bias);
    }
    template <Scalar U>
    void gradients(const reference::tokens<U>& x, const reference::projected_tokens<U>& rows, const tensor_view<U>& of_x, std::span<const tensor_view<U>> of) const {
        reference::channel_convolution_gradients(x, rows, of_x, weights, of[0], of[1]);
    }
};
template <class T>
struct mixing_definition {
    tensor_view<const T> weights, bias;

    template <Scalar U>
    auto operator()(const reference::tokens<U>& x) const {
        return reference::mixing_convolution(x, weights, bias);
    }
    template <Scalar U>
    void gradients(const reference::tokens<U>& x, const reference::projected_tokens<U>& rows, const tensor_view<U>& of_x, std::span<const tensor_view<U>> of) const {
        reference::mixing_convolution_gradients(x, rows, of_x, weights, of[0], of[1]);
    }
};

/// Of linear projections of each head, without biases.
template <class T>
struct per_head_definition {
    std::vector<linear_projection<T>> each;

    template <Scalar U>
    auto operator()(const reference::tokens<U>& x) const {
        return own(x.head)(x);
    }
    template <Scalar U>
    void gradients(const reference::tokens<U>& x, const reference::projected_tokens<U>& rows, const tensor_view<U>& of_x, std::span<const tensor_view<U>> of) const {
        own(x.head).gradients(x, rows, of_x, of.subspan(static_cast<std::size_t>(x.head)));
    }

private:
    linear_definition<T> own(index_t head) const { return {each[static_cast<std::size_t>(head)].matrix, {}}; }
};

constexpr auto linear_operations = [](index_t rows, index_t) { return 2.0 * static_cast<double>(rows); };
constexpr auto one_operation = [](index_t, index_t) { return 1.0; };

} // namespace

static const auto linear_case = linformer_case("linformer", "2 (n + m) p (d_k + d_v)", []<class T>(const problem& p) {
    auto e = random_matrix<T>(p, 1, projected_size(p), 21), f = random_matrix<T>(p, 1, projected_size(p), 22);
    const linear_definition<T> keys{e->view(), {}}, values{f->view(), {}};
    const linformer_attention<linear_projection<T>, linear_projection<T>> op{.key_projection = {keys.matrix},
                                                                             .value_projection = {values.matrix}};
    return parts{op, keys, values, linear_operations, std::pair{e, f}};
});

/// E = F, with lengths: of several entries the first has no token at all.
static const auto lengths_case = linformer_case("linformer_lengths", "2 (n + length) p (d_k + d_v)", []<class T>(const problem& p) {
    auto length = std::make_shared<std::vector<index_t>>();
    for (index_t b = 0; b < p.batch; ++b) {
        const auto present = p.batch == 1 ? 2 * p.keys / 3 : p.keys * b / (p.batch - 1);
        length->push_back(std::max<index_t>(0, p.positions.first_key[b] + present));
    }
    auto e = random_matrix<T>(p, 1, projected_size(p), 23), bias = random_parameter<T>({1, 1, projected_size(p), 1}, 24, 0.1);
    const linear_definition<T> both{e->view(), bias->view()};
    const linformer_attention<linear_projection<T>, shared_projection, lengths> op{.key_projection = {both.matrix, both.bias},
                                                                                   .pattern = lengths{*length}};
    return parts{op, both, both, linear_operations, std::tuple{e, bias, length}};
});

/// Each head has projections of its own size.
static const auto per_head_case = linformer_case("linformer_per_head", "2 (n + m) p_h (d_k + d_v)", []<class T>(const problem& p) {
    struct owner {
        std::vector<std::shared_ptr<tensor<T>>> matrices;
        std::vector<linear_projection<T>> projections;
    };
    const auto make = [&](unsigned seed) {
        auto o = std::make_shared<owner>();
        for (index_t h = 0; h < p.kv_heads; ++h) {
            o->matrices.push_back(random_matrix<T>(p, 1, std::max<index_t>(1, projected_size(p) - 5 * h), seed + static_cast<unsigned>(h)));
            o->projections.push_back({o->matrices.back()->view()});
        }
        return o;
    };
    const auto e = make(30), f = make(40);
    const auto define = [](const std::shared_ptr<owner>& o) { return per_head_definition<T>{o->projections}; };
    using each = projection_per_head<linear_projection<T>>;
    const linformer_attention<each, each> op{.key_projection = {e->projections}, .value_projection = {f->projections}};
    return parts{op, define(e), define(f), linear_operations, std::pair{e, f}};
});

/// Means of bins, in which every fourth token is hidden; some bins have no other.
static const auto mean_case = linformer_case("linformer_mean", "2 n p (d_k + d_v)", []<class T>(const problem& p) {
    const auto rows = projected_size(p);
    const auto third = predicate{[](auto, auto j) { return j % 4 != 1; }};
    const pooling_definition<false> define{rows};
    const linformer_attention<mean_pooling, shared_projection, std::remove_const_t<decltype(third)>> op{.key_projection = {rows},
                                                                                                          .pattern = third};
    return parts{op, define, define, one_operation, std::any()};
});

static const auto max_case = linformer_case("linformer_max", "2 n p (d_k + d_v)", []<class T>(const problem& p) {
    const auto rows = projected_size(p);
    const pooling_definition<true> define{rows};
    return parts{linformer_attention<max_pooling>{.key_projection = {rows}}, define, define, one_operation, std::any()};
});

/// Keys by a kernel for each channel, values with their channels mixed. Every fifth token is hidden.
static const auto convolution_case = linformer_case("linformer_convolution", "2 n m (d_k + d_v) / kernel", []<class T>(const problem& p) {
    const index_t kernel = p.keys >= 512 ? 8 : 1 + p.keys % 5;
    auto w = random_parameter<T>({1, p.kv_heads, kernel, p.key_dim}, 25, 0.5), b = random_parameter<T>({1, 1, 1, p.key_dim}, 26, 0.5);
    auto x = random_parameter<T>({kernel, 1, p.value_dim, p.value_dim}, 27, 1 / std::sqrt(static_cast<double>(kernel * p.value_dim)));
    auto c = random_parameter<T>({1, p.kv_heads, 1, p.value_dim}, 28, 0.5);
    const auto fifth = predicate{[](auto, auto j) { return j % 5 != 2; }};
    const channel_convolution<T> keys{w->view(), b->view()};
    const mixing_convolution<T> values{x->view(), c->view()};
    const linformer_attention<channel_convolution<T>, mixing_convolution<T>, std::remove_const_t<decltype(fifth)>> op{
        .key_projection = keys, .value_projection = values, .pattern = fifth};
    return parts{
        op, channel_definition<T>{keys.weights, keys.bias}, mixing_definition<T>{values.weights, values.bias},
        [](index_t, index_t channels) { return static_cast<double>(1 + channels); }, std::tuple{w, b, x, c}};
});

} // namespace attn::testing
