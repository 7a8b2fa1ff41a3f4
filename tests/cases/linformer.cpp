#include "case.hpp"
#include "naive_softmax.hpp"

#include "attn/attention/linformer_attention.hpp"
#include "attn/attention/pooling.hpp"
#include "attn/pattern/lengths.hpp"
#include "attn/pattern/predicate.hpp"
#include "attn/reference/linformer.hpp"

#include <random>

namespace attn::testing {

using namespace pattern;

namespace {

/// An operator, its projections' definitions, what they refer to, and the operations of projecting one number of a visible token of a head
/// of so many channels.
template <class Op, class E, class F, class Operations>
struct parts {
    Op op;
    E define_keys;
    F define_values;
    Operations operations;
    std::any parameters;
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
    void naive(const inputs<T>& in, const outputs<T>& out) const override {
        if constexpr (requires { parts_.define_keys.matrix; }) return naive_linear(in, out);
        plain(in, out);
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
    const auto& op() const { return parts_.op; }

    /// By Eigen, for one matrix that serves all heads.
    void naive_linear(const inputs<T>& in, const outputs<T>& out) const {
        const auto keys = naive_projection<T>(parts_.define_keys.matrix, in.keys),
                   values = naive_projection<T>(parts_.define_values.matrix, in.values);
        const auto scale = op().scale.value_or(1 / std::sqrt(static_cast<double>(in.queries.shape().channels)));
        naive_softmax<T>({in.queries, keys, values}, out, static_cast<T>(scale), {}, {});
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
                       .supports = [](const problem&) { return true; },
                       .make_float = [build](const problem& p) { return build(p, float{}); },
                       .make_double = [build](const problem& p) { return build(p, double{}); }});
}

/// How many rows a problem's keys are projected to: few, odd and more than keys where a problem is small.
index_t projected_size(const problem& p) { return p.keys >= 512 ? 256 : 1 + (p.keys * 5 / 8 + p.key_dim) % 67; }

template <class T>
std::shared_ptr<tensor<T>> random_parameter(const shape& s, unsigned seed, double deviation) {
    auto t = std::make_shared<tensor<T>>(s);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, deviation);
    std::generate_n(t->data(), s.size(), [&] { return static_cast<T>(normal(random)); });
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
    const auto define = [](const std::shared_ptr<owner>& o) {
        return [o]<Scalar U>(const reference::tokens<U>& x) {
            const auto& own = o->projections[static_cast<std::size_t>(x.head)];
            return reference::linear_projection(reference::tokens<U>{x.x, x.batch, x.head, x.visible}, own.matrix, own.bias);
        };
    };
    using each = projection_per_head<linear_projection<T>>;
    const linformer_attention<each, each> op{.key_projection = {e->projections}, .value_projection = {f->projections}};
    return parts{op, define(e), define(f), linear_operations, std::pair{e, f}};
});

/// Means of bins, in which every fourth token is hidden; some bins have no other.
static const auto mean_case = linformer_case("linformer_mean", "2 n p (d_k + d_v)", []<class T>(const problem& p) {
    const auto rows = projected_size(p);
    const auto third = predicate{[](auto, auto j) { return j % 4 != 1; }};
    const auto define = [rows]<Scalar U>(const reference::tokens<U>& x) { return reference::mean_pooling(x, rows); };
    const linformer_attention<mean_pooling<>, shared_projection, std::remove_const_t<decltype(third)>> op{.key_projection = {rows},
                                                                                                          .pattern = third};
    return parts{op, define, define, one_operation, std::any()};
});

static const auto max_case = linformer_case("linformer_max", "2 n p (d_k + d_v)", []<class T>(const problem& p) {
    const auto rows = projected_size(p);
    const auto define = [rows]<Scalar U>(const reference::tokens<U>& x) { return reference::max_pooling(x, rows); };
    return parts{linformer_attention<max_pooling<>>{.key_projection = {rows}}, define, define, one_operation, std::any()};
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
        op, [keys]<Scalar U>(const reference::tokens<U>& t) { return reference::channel_convolution(t, keys.weights, keys.bias); },
        [values]<Scalar U>(const reference::tokens<U>& t) { return reference::mixing_convolution(t, values.weights, values.bias); },
        [](index_t, index_t channels) { return static_cast<double>(1 + channels); }, std::tuple{w, b, x, c}};
});

} // namespace attn::testing
