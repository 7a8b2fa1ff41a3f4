// The gradients of layers: of attention with all that it may have, and of blocks in training, held to finite differences.
#include "catch.hpp"
#include "errors.hpp"
#include "layer_gradient_checks.hpp"

#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/lsh_backward.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

TEST_CASE("gradients of layers: linear", "[layer][portable]") {
    check_layer_gradients(random_weights().linear("", 13, 9), []<Scalar T>(parameters& w) { return linear_of<T>(w, "layer"); }, {2, 1, 7, 9});
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

TEST_CASE("gradients of layers: multi_head with a gate of each number, and of each head", "[layer][portable]") {
    const auto make = []<Scalar T>(parameters& w) {
        auto layer = multi_head_of<T>(w, "layer", 4, 2);
        layer.gate = linear_of<T>(w, "layer.gate");
        return layer;
    };
    for (const index_t outputs : {4, 4 * 19}) {
        check_layer_gradients(random_weights().attention("", 12, 4, 2, 5, 19).linear(".gate", outputs, 12, outputs == 4), make, {2, 1, 9, 12});
        check_layer_gradients(random_weights().attention("", 12, 4, 2, 5, 19, 7).linear(".gate", outputs, 12), make, {2, 1, 9, 12}, {2, 1, 6, 7});
    }
}

// Swin v2's: cosines of queries and keys, over a temperature.
TEST_CASE("gradients of layers: multi_head of cosines", "[layer][portable]") {
    check_layer_gradients(
        random_weights().attention("", 12, 4, 2, 5, 3),
        []<Scalar T>(parameters& w) { return multi_head_of<T, softmax_attention<>, identity_reduction, unit_norm<T>>(w, "layer", 4, 2, {.scale = 5}); }, {2, 1, 9, 12});
}

TEST_CASE("gradients of layers: transformer_block with curves for norms", "[layer][portable]") {
    auto weights = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    for (const std::string name : {".attention_norm", ".feed_forward_norm"}) weights.norm(name, 12).tensor(name + ".alpha", {1}).tensor(name + ".shift", {1});
    check_layer_gradients(
        weights,
        []<Scalar T>(parameters& w) {
            const auto norm_of = [&](const std::string& name) {
                const auto vector = [&](const std::string& part, index_t count) { return w.template get_vector<T>(name + part, count); };
                const auto number = [&](const std::string& part) { return static_cast<double>(vector(part, 1)[0]); };
                return dynamic_erf<T>{vector(".weight", 12), vector(".bias", 12), number(".alpha"), number(".shift")};
            };
            return transformer_block<dynamic_erf<T>, multi_head<T>, feed_forward<T>>{.attention_norm = norm_of("layer.attention_norm"),
                                                                                      .attention = multi_head_of<T>(w, "layer.attention", 4, 2),
                                                                                      .feed_forward_norm = norm_of("layer.feed_forward_norm"),
                                                                                      .feed_forward = feed_forward_of<T>(w, "layer.feed_forward")};
        },
        {2, 1, 11, 12});
}

// The Reformer's layer: one linear makes queries and keys.
TEST_CASE("gradients of layers: multi_head of LSH attention, whose keys are its queries", "[layer][portable]") {
    const auto weights = random_weights().linear(".q", 12, 12).linear(".v", 12, 12).linear(".out", 12, 12);
    const auto make = []<Scalar T>(parameters& w) {
        static const auto rotations = [] {
            tensor<T> r({2, 2, 6, 2});
            fill_random_projection<T>(r, 5);
            return r;
        }();
        static const rotary<T> turns(20, 4);
        return multi_head<T, lsh_attention<T>>{.heads = 2,
                                               .q = linear_of<T>(w, "layer.q"),
                                               .v = linear_of<T>(w, "layer.v"),
                                               .out = linear_of<T>(w, "layer.out"),
                                               .attention = {.rotations = rotations, .chunk = 4},
                                               .rotation = &turns};
    };
    check_layer_gradients(weights, make, {2, 1, 11, 12});

    parameters w;
    for (const auto* name : {"layer.q", "layer.v", "layer.out"}) random_linear<float>(w, name, 12, 12);
    const auto layer = make.template operator()<float>(w);
    const auto x = random_rows<float>({2, 1, 11, 12}, 3);
    const auto q = forward(layer.q, {.tokens = x}), v = forward(layer.v, {.tokens = x});
    tensor<float> queries({2, 2, 11, 6}), values({2, 2, 11, 6}), joined({2, 1, 11, 12});
    for (index_t b = 0; b < 2; ++b)
        for (index_t i = 0; i < 11; ++i)
            for (index_t c = 0; c < 12; ++c) queries(b, c / 6, i, c % 6) = q(b, 0, i, c), values(b, c / 6, i, c % 6) = v(b, 0, i, c);
    rotate(*layer.rotation, queries.view(), 0, queries.view());
    const auto attended = attend(layer.attention, inputs<float>{queries, queries, values});
    for (index_t b = 0; b < 2; ++b)
        for (index_t i = 0; i < 11; ++i)
            for (index_t c = 0; c < 12; ++c) joined(b, 0, i, c) = attended(b, c / 6, i, c % 6);
    CHECK(same_bits(forward(layer, {.tokens = x}), forward(layer.out, {.tokens = joined})));

    const auto refused = [&](auto spoil) {
        auto bad = layer;
        spoil(bad);
        return error_of([&] { (void)forward(bad, {.tokens = x}); });
    };
    CHECK(refused([&](auto& l) { l.k = l.q; }) == "multi_head: k is given, but the keys of lsh_attention are its queries: leave it out");
    CHECK(refused([&](auto& l) { l.kv_heads = 1; }) == "multi_head: kv_heads are 1, but the keys of lsh_attention are its queries, of 2 heads");
    CHECK(error_of([&] { (void)forward(layer, {.tokens = x, .context = x}); }) == "multi_head: context is given, but the keys of lsh_attention are its queries");
}

TEST_CASE("gradients of layers: transformer_block with norms over tokens, in training", "[layer][portable]") {
    auto weights = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    for (const std::string name : {".attention_norm", ".feed_forward_norm"}) weights.norm(name, 12).norm(name + ".norm", 12).tensor(name + ".eta", {1});
    for (const auto& [gamma, post_norm] : {std::pair{std::optional(0.3), false}, {std::optional(0.0), false}, {std::optional(0.3), true}})
        check_layer_gradients(
            weights,
            [gamma = gamma, post_norm = post_norm]<Scalar T>(parameters& w) {
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
                                                                               .feed_forward = feed_forward_of<T>(w, "layer.feed_forward"),
                                                                               .post_norm = post_norm};
            },
            {2, 1, 11, 12});
}

TEST_CASE("gradients of layers: transformer_block with norms over tokens, whose statistics stay", "[layer][portable]") {
    auto weights = random_weights().attention(".attention", 12, 4, 2, 5, 3).feed_forward(".feed_forward", 12, 20);
    for (const std::string name : {".attention_norm", ".feed_forward_norm"}) weights.norm(name, 12).tensor(name + ".eta", {1});
    check_layer_gradients(
        weights,
        []<Scalar T>(parameters& w) {
            static const auto mean = random_numbers<double>(12, 3), variance = random_numbers<double>(12, 4, 2, 0.3);
            const auto norm_of = [&](const std::string& name) {
                const auto vector = [&](const std::string& part) { return w.template get_vector<T>(name + part, 12); };
                return rep_batch_norm<T>{.batch = {.weight = vector(".weight"), .bias = vector(".bias"), .mean = mean, .variance = variance},
                                         .eta = static_cast<double>(w.template get<T>(name + ".eta", {1}).data()[0])};
            };
            return transformer_block<rep_batch_norm<T>, multi_head<T>, feed_forward<T>>{.attention_norm = norm_of("layer.attention_norm"),
                                                                                         .attention = multi_head_of<T>(w, "layer.attention", 4, 2),
                                                                                         .feed_forward_norm = norm_of("layer.feed_forward_norm"),
                                                                                         .feed_forward = feed_forward_of<T>(w, "layer.feed_forward")};
        },
        {2, 1, 11, 12});
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
    check_says(error_of([&] { rotate_backward(turns, given, 25, back); }), {"rotary", "d_out"});
}

} // namespace attn::testing
