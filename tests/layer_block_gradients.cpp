// The gradients of layers: of feed-forward networks, attention, windows and blocks of every kind, and what is refused. Only where the whole suite
// runs: they are made of what other tests have, and each costs seconds of compiling.
#include "catch.hpp"
#include "errors.hpp"
#include "layer_gradient_checks.hpp"

#include <attn/pattern/causal.hpp>

namespace attn::testing {

namespace {

/// A user's operator that has none.
struct no_gradient {
    static constexpr std::string_view name = "no_gradient";
    static constexpr attention_traits traits{.has_log_sum_exp = false};
    template <Scalar T>
    void check(const inputs<T>&) const {}
    void check_apart(const output_memory&) const {}
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

TEST_CASE("gradients of layers: feed_forward, with any activation, gated and not, of many rows", "[layer]") {
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

TEST_CASE("gradients of layers: multi_head, causal, of grouped heads, of contexts", "[layer]") {
    const auto weights = random_weights().attention("", 12, 4, 2, 5, 3);
    check_layer_gradients(weights, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12});
    check_layer_gradients(
        weights, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2, softmax_attention{.pattern = pattern::causal{}}); }, {2, 1, 11, 12});
    const auto crossed = random_weights().attention("", 12, 4, 2, 5, 3, 7);
    check_layer_gradients(crossed, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12}, {2, 1, 5, 7});
    check_layer_gradients(crossed, []<Scalar T>(parameters& w) { return multi_head_of<T>(w, "layer", 4, 2); }, {2, 1, 11, 12}, {2, 1, 5, 7}, {2, 1, 5, 7});
}

// Norms in training write beside what they read, also where layers otherwise normalise in place.
TEST_CASE("layers with norms in training: a plain forward is that which keeps what a gradient needs", "[layer]") {
    const auto check = [](const auto& make, const tensor<float>& x) {
        batch_norm_statistics plain_statistics(6), kept_statistics(6);
        const auto plain = make(plain_statistics), keeping = make(kept_statistics);
        const auto out = forward(plain, {.tokens = x});
        workspace kept(kept_bytes(keeping, {.tokens = x}));
        tensor<float> same(out.shape());
        forward(keeping, {.tokens = x}, same, kept);
        CHECK(same_bits(out, same));
        CHECK(plain_statistics.batches == kept_statistics.batches);
        CHECK(plain_statistics.batches > 0);
        CHECK(plain_statistics.mean == kept_statistics.mean);
    };
    parameters w;
    const auto cut = random_linear<float>(w, "cut", 6, 12);
    check(
        [&](batch_norm_statistics& statistics) {
            return spatial_reduction<float, in_training<batch_norm<float>>>{.grid = {.height = 4, .width = 6, .window_height = 2, .window_width = 2}, .projection = cut, .norm = {{}, &statistics}};
        },
        random_rows<float>({2, 1, 24, 3}, 3));
    const auto attention = random_multi_head<float>(w, "a", 12, 2, 2, 6, 6);
    check(
        [&](batch_norm_statistics& statistics) {
            using norm = in_training<batch_norm<float>>;
            return multi_head<float, softmax_attention<>, identity_reduction, norm>{
                .heads = 2, .kv_heads = 2, .q = attention.q, .k = attention.k, .v = attention.v, .out = attention.out, .query_norm = norm{{}, &statistics}, .key_norm = norm{{}, &statistics}};
        },
        random_rows<float>({2, 1, 9, 12}, 3));
}

TEST_CASE("gradients of layers: spatial_reduction, by itself and before keys and values", "[layer]") {
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

TEST_CASE("gradients of layers: windowed, shifted", "[layer]") {
    const window_grid grid{.height = 4, .width = 6, .window_height = 2, .window_width = 3, .shift_height = 1, .shift_width = 2};
    check_layer_gradients(random_weights().attention("", 8, 2, 1, 4, 4),
                          [=]<Scalar T>(parameters& w) {
                              const softmax_attention op{.pattern = grid.shift_segments()};
                              return windowed<multi_head<T, std::remove_const_t<decltype(op)>>>{grid, multi_head_of<T>(w, "layer", 2, 1, op)};
                          },
                          {2, 1, 24, 8});
}

TEST_CASE("gradients of layers: transformer_block, with norms of rows, without, and with a context", "[layer]") {
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
    const auto post_norm_block = [=]<Scalar T>(parameters& w) {
        auto own = block.template operator()<T>(w);
        own.post_norm = true;
        return own;
    };
    check_layer_gradients(normed, post_norm_block, {2, 1, 11, 12});
    check_layer_gradients(normed, post_norm_block, {2, 1, 11, 12}, {2, 1, 6, 12});
}

TEST_CASE("gradients of layers: a layer of an operator without a gradient has none, and still runs", "[layer]") {
    static_assert(Layer<multi_head<float, no_gradient>> && !DifferentiableLayer<multi_head<float, no_gradient>>);
    static_assert(!DifferentiableLayer<transformer_block<layer_norm<float>, multi_head<float, no_gradient>, feed_forward<float>>>);
    static_assert(!DifferentiableLayer<windowed<multi_head<float, no_gradient>>>);
    struct own_norm : identity_norm<float> {};
    static_assert(!DifferentiableLayer<transformer_block<own_norm, multi_head<float>, feed_forward<float>>>);
    static_assert(DifferentiableLayer<transformer_block<batch_norm<float>, multi_head<float>, feed_forward<float>>>);
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
    refused(weight, {}, {"transformer_block", "d_out", "(1, 1, 20, 12)", "(2, 1, 11, 12)"});
    refused(given, {.tokens = weight}, {"wanted.tokens", "(1, 1, 20, 12)", "(2, 1, 11, 12)"});
    refused(given, {.context = dx}, {"wanted.context", "there is no context"});
    tensor<double> dq({1, 1, 20, 12}), other({1, 1, 20, 11});
    refused(given, {.parameters = {.attention = {.q = {.weight = other}}}}, {"wanted.attention.q.weight", "(1, 1, 20, 11)", "(1, 1, 20, 12)"});
    refused(given, {.parameters = {.attention = {.q = {.weight = dq}}, .feed_forward = {.up = {.weight = dq}}}},
            {"wanted.feed_forward.up.weight", "overlaps wanted.attention.q.weight"});
    refused(given, {.parameters = {.feed_forward_norm = {.bias = few}}}, {"wanted.feed_forward_norm.bias", "(1, 1, 1, 5)", "(1, 1, 1, 12)"});
    refused(given, {.tokens = out, .parameters = {.attention = {.out = {.bias = std::span(out.data(), 12)}}}}, {"wanted.attention.out.bias", "overlaps wanted.tokens"});
    const tensor_view<double> itself(const_cast<double*>(block.feed_forward.up.weight.numbers().data()), {1, 1, 20, 12}, {0, 0, 12, 1});
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
