// The gradients of layers: of feed-forward networks, attention, windows and whole blocks, held to finite differences.
#include "catch.hpp"
#include "errors.hpp"
#include "layer_gradient_checks.hpp"

#include <attn/attention/talking_heads_attention.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

namespace {

/// Random weights by names that end in ".weight" and ".bias".
class random_weights {
public:
    random_weights& linear(const std::string& name, index_t outputs, index_t inputs, bool has_bias = true) {
        random_linear<double>(*weights_, "layer" + name, outputs, inputs, has_bias);
        return *this;
    }
    random_weights& norm(const std::string& name, index_t channels, bool has_bias = true) {
        const auto seed = static_cast<unsigned>(std::hash<std::string>()(name));
        add_random<double>(*weights_, "layer" + name + ".weight", {channels}, seed);
        if (has_bias) add_random<double>(*weights_, "layer" + name + ".bias", {channels}, seed + 1);
        return *this;
    }
    random_weights& tensor(const std::string& name, const parameters::extents& size) {
        add_random<double>(*weights_, "layer" + name, size, 5);
        return *this;
    }
    random_weights& attention(const std::string& name, index_t channels, index_t heads, index_t kv_heads, index_t d_k, index_t d_v, index_t context_channels = 0) {
        const auto from = context_channels > 0 ? context_channels : channels;
        linear(name + ".q", heads * d_k, channels).linear(name + ".k", kv_heads * d_k, from).linear(name + ".v", kv_heads * d_v, from);
        return linear(name + ".out", channels, heads * d_v);
    }
    random_weights& feed_forward(const std::string& name, index_t channels, index_t hidden, bool gated = false) {
        linear(name + ".up", hidden, channels).linear(name + ".down", channels, hidden);
        return gated ? linear(name + ".gate", hidden, channels) : *this;
    }
    operator const parameters&() const { return *weights_; }

private:
    std::shared_ptr<parameters> weights_ = std::make_shared<parameters>();
};

template <Scalar T>
linear<T> linear_of(parameters& weights, const std::string& name) {
    const auto& size = weights.size(name + ".weight");
    return weights.get_linear<T>(name, size[0], size[1]);
}
template <Scalar T, class F = gelu>
feed_forward<T, F> feed_forward_of(parameters& weights, const std::string& name) {
    feed_forward<T, F> layer{.up = linear_of<T>(weights, name + ".up"), .down = linear_of<T>(weights, name + ".down")};
    if (weights.contains(name + ".gate.weight")) layer.gate = linear_of<T>(weights, name + ".gate");
    return layer;
}
template <Scalar T, class A = softmax_attention<>, class R = identity_reduction, class N = identity_norm<T>>
multi_head<T, A, R, N> multi_head_of(parameters& weights, const std::string& name, index_t heads, index_t kv_heads, const A& attention = {}) {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .q = linear_of<T>(weights, name + ".q"),
            .k = linear_of<T>(weights, name + ".k"),
            .v = linear_of<T>(weights, name + ".v"),
            .out = linear_of<T>(weights, name + ".out"),
            .attention = attention};
}
template <Scalar T>
layer_norm<T> layer_norm_of(parameters& weights, const std::string& name) {
    const auto channels = weights.size(name + ".weight")[0];
    return {weights.get_vector<T>(name + ".weight", channels), weights.get_vector<T>(name + ".bias", channels)};
}

/// A user's operator that has none.
struct no_gradient {
    static constexpr std::string_view name = "no_gradient";
    template <Scalar T>
    void check(const inputs<T>&) const {}
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes&, index_t) const {
        return 0;
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution&) const {
        std::copy_n(in.values.data(), in.values.shape().size(), out.values.data());
    }
};

} // namespace

TEST_CASE("gradients of layers: linear", "[layer][portable]") {
    check_layer_gradients(random_weights().linear("", 13, 9), []<Scalar T>(parameters& w) { return linear_of<T>(w, "layer"); }, {2, 1, 7, 9});
}

TEST_CASE("gradients of layers: feed_forward, with any activation, gated and not, of many rows", "[layer][portable]") {
    const auto check = [](auto activation, bool gated, const shape& tokens) {
        using F = decltype(activation);
        check_layer_gradients(random_weights().feed_forward("", 6, 21, gated), []<Scalar T>(parameters& w) { return feed_forward_of<T, F>(w, "layer"); }, tokens);
    };
    const auto own = []<class S>(S x) { return x * x * x + S(0.5) * x; };
    check(gelu{}, false, {2, 1, 9, 6});
    check(gelu_tanh{}, false, {1, 1, 5, 6});
    check(silu{}, true, {2, 1, 7, 6});
    check(own, true, {1, 1, 3, 6});
    check(gelu{}, false, {2, 1, 401, 6});
}

TEST_CASE("gradients of layers: relu's slope is that of its side", "[layer]") {
    CHECK(detail::differentiated(relu{}, 2.0).derivative == 1);
    CHECK(detail::differentiated(relu{}, -2.0).derivative == 0);
    CHECK(detail::differentiated(relu{}, 0.0).derivative == 0);
}

TEST_CASE("gradients of layers: multi_head, causal, of grouped heads, of contexts", "[layer][portable]") {
    const auto weights = random_weights().attention("", 12, 4, 2, 5, 3);
    check_layer_gradients(weights, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12});
    check_layer_gradients(
        weights, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2, softmax_attention{.pattern = pattern::causal{}}); }, {2, 1, 11, 12});
    const auto crossed = random_weights().attention("", 12, 4, 2, 5, 3, 7);
    check_layer_gradients(crossed, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12}, {2, 1, 5, 7});
    check_layer_gradients(crossed, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12}, {2, 1, 5, 7}, {2, 1, 5, 7});
}

TEST_CASE("gradients of layers: multi_head with norms of queries and keys, rotary positions, and a bias", "[layer][portable]") {
    const auto weights = random_weights().attention("", 12, 2, 2, 6, 4).norm(".query_norm", 6).norm(".key_norm", 6).tensor(".attention.bias", {2, 9, 9});
    check_layer_gradients(
        weights,
        []<Scalar T>(parameters& w) {
            static const rotary<T> turns(20, 4);
            const softmax_attention op{.score = additive_bias<T>{w.template get<T>("layer.attention.bias", {2, 9, 9})}};
            auto layer = multi_head_of<T, std::remove_const_t<decltype(op)>, identity_reduction, layer_norm<T>>(w, "layer", 2, 2, op);
            layer.rotation = &turns;
            layer.query_norm = layer_norm_of<T>(w, "layer.query_norm");
            layer.key_norm = layer_norm_of<T>(w, "layer.key_norm");
            return layer;
        },
        {2, 1, 9, 12});
}

TEST_CASE("gradients of layers: spatial_reduction, by itself and before keys and values", "[layer][portable]") {
    const window_grid grid{.height = 4, .width = 6, .window_height = 2, .window_width = 3};
    check_layer_gradients(random_weights().linear(".projection", 10, 6 * 5).norm(".norm", 10),
                          [=]<Scalar T>(parameters& w) {
                              return spatial_reduction<T, layer_norm<T>>{grid, linear_of<T>(w, "layer.projection"), layer_norm_of<T>(w, "layer.norm")};
                          },
                          {2, 1, 24, 5});
    const auto weights = random_weights().attention("", 8, 2, 2, 4, 4, 5).linear(".reduce.projection", 5, 6 * 8);
    const auto reduced = [=]<Scalar T>(parameters& w) {
        auto layer = multi_head_of<T, softmax_attention<>, spatial_reduction<T>>(w, "layer", 2, 2);
        layer.reduce = {grid, linear_of<T>(w, "layer.reduce.projection")};
        return layer;
    };
    check_layer_gradients(weights, reduced, {2, 1, 24, 8});
    check_layer_gradients(weights, reduced, {2, 1, 7, 8}, {2, 1, 24, 8});
}

TEST_CASE("gradients of layers: windowed, shifted", "[layer][portable]") {
    const window_grid grid{.height = 4, .width = 6, .window_height = 2, .window_width = 3, .shift_height = 1, .shift_width = 2};
    check_layer_gradients(random_weights().attention("", 8, 2, 1, 4, 4),
                          [=]<Scalar T>(parameters& w) {
                              const softmax_attention op{.pattern = grid.shift_segments()};
                              return windowed<multi_head<T, std::remove_const_t<decltype(op)>>>{grid, multi_head_of<T>(w, "layer", 2, 1, op)};
                          },
                          {2, 1, 24, 8});
}

TEST_CASE("gradients of layers: transformer_block, with norms of rows, without, and with a context", "[layer][portable]") {
    const auto weights = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    check_layer_gradients(
        weights,
        []<Scalar T>(parameters& w) {
            return transformer_block<identity_norm<T>, multi_head<T>, feed_forward<T>>{
                .attention = multi_head_of<T>(w, "layer.attention", 4, 2), .feed_forward = feed_forward_of<T>(w, "layer.feed_forward")};
        },
        {2, 1, 11, 12});
    auto normed = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    normed.norm(".attention_norm", 12).norm(".feed_forward_norm", 12);
    const auto block = []<Scalar T>(parameters& w) {
        return transformer_block<layer_norm<T>, multi_head<T>, feed_forward<T>>{.attention_norm = layer_norm_of<T>(w, "layer.attention_norm"),
                                                                                 .attention = multi_head_of<T>(w, "layer.attention", 4, 2),
                                                                                 .feed_forward_norm = layer_norm_of<T>(w, "layer.feed_forward_norm"),
                                                                                 .feed_forward = feed_forward_of<T>(w, "layer.feed_forward")};
    };
    check_layer_gradients(normed, block, {2, 1, 11, 12});
    check_layer_gradients(normed, block, {2, 1, 11, 12}, {2, 1, 6, 12});
}

TEST_CASE("gradients of layers: transformer_block with norms over tokens, in training", "[layer][portable]") {
    auto weights = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    for (const std::string name : {".attention_norm", ".feed_forward_norm"}) weights.norm(name, 12).norm(name + ".norm", 12).tensor(name + ".eta", {1});
    for (const std::optional<double> gamma : {std::optional(0.3), std::optional(0.0)})
        check_layer_gradients(
            weights,
            [=]<Scalar T>(parameters& w) {
                using norm = in_training<progressive_rep_batch_norm<layer_norm<T>>>;
                static batch_norm_statistics first(12), second(12);
                const auto norm_of = [&](const std::string& name, batch_norm_statistics& statistics) {
                    const auto vector = [&](const std::string& part) { return w.template get_vector<T>(name + part, 12); };
                    norm n{.norm = {}, .statistics = &statistics, .gamma = gamma};
                    n.norm.norm = layer_norm_of<T>(w, name + ".norm");
                    n.norm.rep.batch.weight = vector(".weight");
                    n.norm.rep.batch.bias = vector(".bias");
                    n.norm.rep.eta = static_cast<double>(w.template get<T>(name + ".eta", {1}).data()[0]);
                    return n;
                };
                return transformer_block<norm, multi_head<T>, feed_forward<T>>{.attention_norm = norm_of("layer.attention_norm", first),
                                                                               .attention = multi_head_of<T>(w, "layer.attention", 4, 2),
                                                                               .feed_forward_norm = norm_of("layer.feed_forward_norm", second),
                                                                               .feed_forward = feed_forward_of<T>(w, "layer.feed_forward")};
            },
            {2, 1, 11, 12});
}

TEST_CASE("gradients of layers: a layer of an operator without a gradient has none, and still runs", "[layer]") {
    static_assert(Layer<multi_head<float, no_gradient>> && !DifferentiableLayer<multi_head<float, no_gradient>>);
    static_assert(!DifferentiableLayer<transformer_block<layer_norm<float>, multi_head<float, no_gradient>, feed_forward<float>>>);
    static_assert(!DifferentiableLayer<windowed<multi_head<float, no_gradient>>>);
    static_assert(!DifferentiableLayer<transformer_block<batch_norm<float>, multi_head<float>, feed_forward<float>>>);
}

// A few steps of gradient descent towards random targets, by blocks with a progressive norm on its way from LayerNorm to RepBN.
TEST_CASE("gradients of layers: the loss falls as a block is trained, by the same bits on any executor", "[layer][portable]") {
    const auto losses_on = [](auto& executor) {
        auto own = random_weights().attention(".attention", 12, 4, 2, 3, 3).feed_forward(".feed_forward", 12, 20);
        for (const std::string name : {".attention_norm", ".feed_forward_norm"}) own.norm(name, 12).norm(name + ".norm", 12).tensor(name + ".eta", {1});
        const parameters& from = own;
        parameters weights;
        std::map<std::string, tensor_view<float>> values;
        for (const auto& name : from.names()) {
            values[name] = weights.add<float>(name, from.size(name));
            std::transform(from.get<double>(name, from.size(name)).data(), from.get<double>(name, from.size(name)).data() + values[name].shape().size(),
                           values[name].data(), [](double x) { return static_cast<float>(x); });
        }
        const gradient_store<float> gradients(weights);
        batch_norm_statistics statistics[2] = {batch_norm_statistics(12), batch_norm_statistics(12)};
        const auto x = random_rows<float>({4, 1, 25, 12}, 3), target = random_rows<float>(x.shape(), 4, 0, 0.5);
        tensor<float> out(x.shape()), of_out(x.shape());
        std::vector<double> losses;
        for (int step = 0; step < 30; ++step) {
            const auto norm_of = [&](const std::string& name, batch_norm_statistics& moved) {
                const auto vector = [&](const std::string& part) { return std::as_const(weights).get_vector<float>(name + part, 12); };
                using progressive = progressive_rep_batch_norm<layer_norm<float>>;
                return in_training<progressive>{{.norm = {vector(".norm.weight"), vector(".norm.bias")},
                                                 .rep = {.batch = {.weight = vector(".weight"), .bias = vector(".bias")},
                                                         .eta = static_cast<double>(values[name + ".eta"].data()[0])}},
                                                &moved,
                                                1 - step / 30.0};
            };
            const transformer_block<in_training<progressive_rep_batch_norm<layer_norm<float>>>, multi_head<float>, feed_forward<float>> block{
                .attention_norm = norm_of("layer.attention_norm", statistics[0]),
                .attention = multi_head_of<float>(weights, "layer.attention", 4, 2),
                .feed_forward_norm = norm_of("layer.feed_forward_norm", statistics[1]),
                .feed_forward = feed_forward_of<float>(weights, "layer.feed_forward")};
            workspace kept(kept_bytes(block, {.tokens = x}));
            forward(block, {.tokens = x}, out, kept, executor);
            double loss = 0;
            for (index_t e = 0; e < out.shape().size(); ++e) {
                const auto apart = out.data()[e] - target.data()[e];
                of_out.data()[e] = apart / static_cast<float>(out.shape().size());
                loss += static_cast<double>(apart * apart) / static_cast<double>(out.shape().size());
            }
            losses.push_back(loss);
            backward(block, {.tokens = x}, kept, of_out, {.parameters = named(gradients, "layer", block)}, executor);
            for (const auto& [name, g] : gradients.views())
                for (index_t e = 0; e < g.shape().size(); ++e) values[name].data()[e] -= 0.3f * g.data()[e];
        }
        return losses;
    };
    sequential here;
    const auto losses = losses_on(here);
    INFO("from " << losses.front() << " to " << losses.back());
    CHECK(losses.back() < 0.5 * losses.front());
    thread_pool pool(3);
    CHECK(losses_on(pool) == losses);
}

TEST_CASE("gradients of layers: rotations are turned back", "[layer][portable]") {
    const rotary<double> turns(30, 6, rotary_pairs::interleaved);
    const auto x = random_rows<double>({2, 1, 9, 8}, 3), given = random_rows<double>({2, 1, 9, 8}, 4);
    tensor<double> turned(x.shape()), back(x.shape());
    rotate(turns, x, 5, turned);
    rotate_backward(turns, given, 5, back);
    double left = 0, right = 0;
    for (index_t e = 0; e < x.shape().size(); ++e) left += turned.data()[e] * given.data()[e], right += x.data()[e] * back.data()[e];
    CHECK(std::abs(left - right) <= 1e-13 * (1 + std::abs(left))); // <R x, g> = <x, R^T g>
    check_says(error_of([&] { rotate_backward(turns, given, 25, back); }), {"rotary", "given"});
}

TEST_CASE("gradients of layers: what is wrong is refused, by name", "[layer]") {
    auto from = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    from.norm(".attention_norm", 12).norm(".feed_forward_norm", 12);
    parameters w = moved(from, {}, 0);
    const transformer_block<layer_norm<double>, multi_head<double>, feed_forward<double>> block{
        .attention_norm = layer_norm_of<double>(w, "layer.attention_norm"),
        .attention = multi_head_of<double>(w, "layer.attention", 4, 2),
        .feed_forward_norm = layer_norm_of<double>(w, "layer.feed_forward_norm"),
        .feed_forward = feed_forward_of<double>(w, "layer.feed_forward")};
    const auto x = random_rows<double>({2, 1, 11, 12}, 3), given = random_rows<double>({2, 1, 11, 12}, 4);
    tensor<double> out(x.shape()), dx(x.shape()), weight({1, 1, 20, 12});
    std::vector<double> few(5);
    const layer_inputs<double> in{.tokens = x};
    workspace kept(kept_bytes(block, in));
    forward(block, in, out, kept);
    using wanted = layer_gradients<std::remove_const_t<decltype(block)>>;
    const auto refused = [&](const tensor_view<const double>& of_out, const wanted& gradients, const std::vector<std::string>& parts) {
        check_says(error_of([&] { backward(block, in, kept, of_out, gradients); }), parts);
    };
    refused(weight, {}, {"transformer_block", "given", "(1, 1, 20, 12)", "(2, 1, 11, 12)"});
    refused(given, {.tokens = weight}, {"wanted.tokens", "(1, 1, 20, 12)", "(2, 1, 11, 12)"});
    refused(given, {.context = dx}, {"wanted.context", "there is no context"});
    tensor<double> dq({1, 1, 20, 12}), other({1, 1, 20, 11});
    refused(given, {.parameters = {.attention = {.q = {.weight = other}}}}, {"wanted.attention.q.weight", "(1, 1, 20, 11)", "(1, 1, 20, 12)"});
    refused(given, {.parameters = {.attention = {.q = {.weight = dq}}, .feed_forward = {.up = {.weight = dq}}}},
            {"wanted.feed_forward.up.weight", "overlaps wanted.attention.q.weight"});
    refused(given, {.parameters = {.feed_forward_norm = {.bias = few}}}, {"wanted.feed_forward_norm.bias", "(1, 1, 1, 5)", "(1, 1, 1, 12)"});
    refused(given, {.tokens = out, .parameters = {.attention = {.out = {.bias = std::span(out.data(), 12)}}}}, {"wanted.attention.out.bias", "overlaps wanted.tokens"});
    const tensor_view<double> itself(const_cast<double*>(block.feed_forward.up.weight.data()), {1, 1, 20, 12}, {0, 0, 12, 1});
    refused(given, {.parameters = {.feed_forward = {.up = {.weight = itself}}}}, {"wanted.feed_forward.up.weight", "overlaps the weight of a linear"});
    const tensor_view<double> in_kept(reinterpret_cast<double*>(kept.bytes().data()), x.shape(), {132, 132, 12, 1});
    refused(given, {.tokens = in_kept}, {"wanted.tokens", "overlaps kept"});
    workspace little(kept_bytes(block, in) - 1);
    check_says(error_of([&] { backward(block, in, little, given, {}); }), {"transformer_block", "kept", "(2, 1, 11, 12)"});
    check_says(error_of([&] { forward(block, in, out, little); }), {"transformer_block", "kept"});
    check_says(error_of([&] { forward(block, {.tokens = out}, out, kept); }), {"transformer_block", "out", "overlaps tokens"});
    sequential here;
    workspace memory(backward_workspace_bytes(block, in, here) - 1);
    check_says(error_of([&] { backward(block, in, kept, given, {}, execution(here, memory)); }), {"transformer_block", "workspace"});
}

} // namespace attn::testing
