// Layers by the names of others' files: the layer that the linears make, whatever they are called, their gradients by the same names, and every
// way to be wrong.
#include "catch.hpp"
#include "layer_checks.hpp"

#include <attn/layer/named_gradients.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

namespace {

constexpr index_t named_channels = 12, named_heads = 4, named_head = 3, named_hidden = 7;
std::string named_problem(const auto& call) { return error_of<parameter_error>(call); }

/// Random weights of so many heads of keys and values, by the names q, k, v and out, and by others, of the same numbers; q's alone if the
/// others are "": then it holds all three.
struct renamed {
    parameters plain, other;

    renamed(const std::array<std::string, 3>& names, const std::string& out, index_t kv_heads, bool has_bias) {
        for (const char* name : {"q", "k", "v", "out"})
            static_cast<void>(random_linear<float>(plain, name, *name == 'q' || *name == 'o' ? named_channels : kv_heads * named_head,
                                                   named_channels, has_bias));
        if (names[1].empty()) {
            copy({"q", "k", "v"}, names[0]);
        } else {
            copy({"q"}, names[0]);
            copy({"k"}, names[1]);
            copy({"v"}, names[2]);
        }
        copy({"out"}, out);
    }
    /// The linears `from`, one after the other, as `to`, whose names of weight and bias end as torch's in_proj_weight if it ends so.
    void copy(const std::vector<std::string>& from, const std::string& to) {
        const std::string end = to.ends_with("in_proj") ? "_" : ".";
        for (const std::string part : {"weight", "bias"}) {
            std::vector<float> numbers;
            for (const auto& name : from) {
                if (!plain.contains(name + "." + part)) return;
                const auto& size = plain.size(name + "." + part);
                const auto rows = plain.get<float>(name + "." + part, size);
                numbers.insert(numbers.end(), rows.data(), rows.data() + rows.shape().size());
            }
            const auto outputs = std::ssize(numbers) / (part == "weight" ? named_channels : 1);
            const auto t = other.add<float>("attn." + to + end + part,
                                            part == "weight" ? parameters::extents{outputs, named_channels} : parameters::extents{outputs});
            std::ranges::copy(numbers, t.data());
        }
    }
};

/// What other files call q, k and v, or all three, and the result.
const std::vector<std::pair<std::array<std::string, 3>, std::string>> attention_files{
    {{"q", "k", "v"}, "out"},
    {{"q_proj", "k_proj", "v_proj"}, "o_proj"},
    {{"q_proj", "k_proj", "v_proj"}, "out_proj"},
    {{"query", "key", "value"}, "out"},
    {{"to_q", "to_k", "to_v"}, "to_out.0"},
    {{"wq", "wk", "wv"}, "wo"},
    {{"qkv", "", ""}, "proj"},
    {{"Wqkv", "", ""}, "out"},
    {{"qkv_proj", "", ""}, "o_proj"},
    {{"in_proj", "", ""}, "out_proj"},
    {{"self.query", "self.key", "self.value"}, "output.dense"}};
/// And up, down and the gate of a feed-forward layer, if it has one.
const std::vector<std::array<std::string, 3>> feed_forward_files{{"up", "down", "gate"},
                                                                 {"up", "down", ""},
                                                                 {"up_proj", "down_proj", "gate_proj"},
                                                                 {"w3", "w2", "w1"},
                                                                 {"fc1_x", "fc2", "fc1_g"},
                                                                 {"fc1", "fc2", ""},
                                                                 {"linear1", "linear2", ""},
                                                                 {"intermediate.dense", "output.dense", ""}};

/// The gradients that a layer's backward writes into some of ones.
template <class L>
void differentiate(const L& layer, const tensor<float>& x, const typename L::gradients& wanted) {
    tensor<float> out(x.shape()), d_out = random_rows<float>(x.shape(), 9);
    workspace kept(kept_bytes(layer, {.tokens = x}));
    forward(layer, {.tokens = x}, out, kept);
    backward(layer, {.tokens = x}, kept, d_out, {.parameters = wanted});
}
/// The numbers of some tensors, one after the other; those that are not there are left out.
std::vector<float> joined(parameters& all, const std::vector<std::string>& names) {
    std::vector<float> numbers;
    for (const auto& name : names) {
        if (!all.contains(name)) continue;
        const auto own = all.elements<float>(name);
        numbers.insert(numbers.end(), own.begin(), own.end());
    }
    return numbers;
}

} // namespace

TEST_CASE("named layers: attention is what its linears make, by each of their names", "[layer]") {
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    for (const auto& [own, out] : attention_files)
        for (const index_t kv_heads : {named_heads, index_t{2}, index_t{1}})
            for (const bool has_bias : {true, false}) {
                INFO(own[0] << ", " << out << ", " << kv_heads << " heads of keys, bias: " << has_bias);
                renamed weights(own, out, kv_heads, has_bias);
                const softmax_attention attention{.pattern = causal{}};
                const multi_head by_hand{.heads = named_heads,
                                         .kv_heads = kv_heads,
                                         .q = weights.plain.get_linear<float>("q"),
                                         .k = weights.plain.get_linear<float>("k"),
                                         .v = weights.plain.get_linear<float>("v"),
                                         .out = weights.plain.get_linear<float>("out"),
                                         .attention = attention};
                const auto named = get_multi_head<float>(std::as_const(weights.other), "attn.", named_heads, attention);
                CHECK(named.kv_heads == kv_heads);
                CHECK(same_bits(result_of(named, x), result_of(by_hand, x)));
                const auto in_double = get_multi_head<double>(weights.other, "attn.", named_heads);
                CHECK(in_double.q.outputs() == named_channels);
                CHECK(in_double.out.bias.empty() != has_bias);
            }
}

TEST_CASE("named layers: feed-forward is what its linears make, by each of their names, gated or not", "[layer]") {
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    for (const auto& own : feed_forward_files) {
        INFO(own[0]);
        parameters weights;
        feed_forward<float, silu> by_hand{.up = random_linear<float>(weights, "mlp." + own[0], named_hidden, named_channels),
                                          .down = random_linear<float>(weights, "mlp." + own[1], named_channels, named_hidden)};
        if (!own[2].empty()) by_hand.gate = random_linear<float>(weights, "mlp." + own[2], named_hidden, named_channels);
        CHECK(same_bits(result_of(get_feed_forward<float>(weights, "mlp.", silu{}), x), result_of(by_hand, x)));
        const feed_forward<float> with_gelu{.up = by_hand.up, .down = by_hand.down, .gate = by_hand.gate};
        CHECK(same_bits(result_of(get_feed_forward<float>(std::as_const(weights), "mlp."), x), result_of(with_gelu, x)));
    }
}

TEST_CASE("named gradients: attention's are those of its linears, by each of their names", "[layer]") {
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    for (const auto& [own, out] : attention_files)
        for (const index_t kv_heads : {named_heads, index_t{2}})
            for (const bool has_bias : {true, false}) {
                INFO(own[0] << ", " << out << ", " << kv_heads << " heads of keys, bias: " << has_bias);
                renamed weights(own, out, kv_heads, has_bias);
                parameters plain = zeros_like<float>(weights.plain), named = zeros_like<float>(weights.other);
                const auto layer = get_multi_head<float>(weights.other, "attn.", named_heads, softmax_attention{.pattern = causal{}});
                const auto of = [&](const char* name) {
                    linear<float>::gradients g{.weight = plain.writable<float>(std::string(name) + ".weight")};
                    if (has_bias)
                        g.bias = {plain.elements<float>(std::string(name) + ".bias").data(),
                                  static_cast<std::size_t>(plain.size(std::string(name) + ".bias")[0])};
                    return g;
                };
                differentiate(layer, x, {.q = of("q"), .k = of("k"), .v = of("v"), .out = of("out")});
                differentiate(layer, x, get_gradients(layer, named, "attn."));
                const std::string end = own[0] == "in_proj" ? "_" : ".";
                for (const std::string part : {"weight", "bias"}) {
                    const auto wanted = joined(plain, {"q." + part, "k." + part, "v." + part, "out." + part});
                    CHECK(wanted.empty() == (part == "bias" && !has_bias));
                    CHECK(std::ranges::count(wanted, 0.0f) <= 1);
                    CHECK(joined(named, {"attn." + own[0] + end + part, "attn." + own[1] + "." + part, "attn." + own[2] + "." + part,
                                         "attn." + out + "." + part}) == wanted);
                }
            }
}

TEST_CASE("named gradients: those of a feed-forward layer, by each of its linears' names, gated or not", "[layer]") {
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    for (const auto& own : feed_forward_files) {
        INFO(own[0]);
        parameters weights;
        static_cast<void>(random_linear<float>(weights, "mlp." + own[0], named_hidden, named_channels));
        static_cast<void>(random_linear<float>(weights, "mlp." + own[1], named_channels, named_hidden));
        if (!own[2].empty()) static_cast<void>(random_linear<float>(weights, "mlp." + own[2], named_hidden, named_channels));
        parameters gradients = zeros_like<float>(weights), by_hand = zeros_like<float>(weights);
        const auto layer = get_feed_forward<float>(weights, "mlp.", silu{});
        differentiate(layer, x, get_gradients(layer, gradients, "mlp."));
        feed_forward<float, silu>::gradients wanted{.up = get_gradients(layer.up, by_hand, "mlp." + own[0]),
                                                    .down = get_gradients(layer.down, by_hand, "mlp." + own[1])};
        if (!own[2].empty()) wanted.gate = get_gradients(layer.gate, by_hand, "mlp." + own[2]);
        differentiate(layer, x, wanted);
        CHECK(joined(gradients, weights.names()) == joined(by_hand, weights.names()));
        CHECK(std::ranges::count(joined(gradients, weights.names()), 0.0f) == 0);
    }
}

TEST_CASE("named gradients: those of norms, and of a convolution as a linear of patches", "[layer]") {
    parameters weights;
    for (const char* name : {"norm.weight", "norm.bias", "rep.weight", "rep.bias"}) add_random<float>(weights, name, {named_channels}, 4);
    weights.add<float>("rep.eta", {1});
    add_random<float>(weights, "patches.weight", {named_channels, 3, 2, 2}, 5, 1.0);
    parameters gradients = zeros_like<float>(weights);
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3), d_out = random_rows<float>(x.shape(), 9);
    const layer_norm<float> norm{.weight = weights.get_vector<float>("norm.weight"), .bias = weights.get_vector<float>("norm.bias")};
    backward(norm, x, d_out, get_gradients(norm, gradients, "norm"));
    std::vector<float> weight(named_channels), bias(named_channels);
    backward(norm, x, d_out, {.weight = weight, .bias = bias});
    CHECK(joined(gradients, {"norm.weight"}) == weight);
    CHECK(joined(gradients, {"norm.bias"}) == bias);

    const std::vector<double> mean(named_channels), variance(named_channels, 1.0);
    const rep_batch_norm<float> rep{.batch = {.mean = mean, .variance = variance}, .eta = 0.5};
    const auto of_rep = get_gradients(rep, gradients, "rep");
    CHECK(of_rep.eta.data() == gradients.elements<float>("rep.eta").data());
    CHECK(of_rep.weight.data() == gradients.elements<float>("rep.weight").data());
    CHECK(of_rep.bias.size() == named_channels);

    const auto patches = weights.get_linear<float>("patches");
    const auto of_patches = get_gradients(patches, gradients, "patches");
    CHECK(of_patches.weight.shape() == shape{1, 1, named_channels, 12});
    CHECK(&of_patches.weight(0, 0, 1, 0) == gradients.writable<float>("patches.weight").data() + 12);
    CHECK(of_patches.bias.empty());
}

TEST_CASE("named layers: a block is what its parts make, by each row of names, and so are its gradients", "[layer]") {
    struct row {
        std::string attention, feed_forward, first_norm, second_norm;
        std::array<std::string, 4> projections;
        std::array<std::string, 2> hidden;
        bool post_norm;
    };
    const std::vector<row> rows{
        {"attn.", "mlp.", "norm1", "norm2", {"q", "k", "v", "proj"}, {"fc1", "fc2"}, false},
        {"self_attn.",
         "mlp.",
         "input_layernorm",
         "post_attention_layernorm",
         {"q_proj", "k_proj", "v_proj", "o_proj"},
         {"up_proj", "down_proj"},
         false},
        {"self_attn.", "", "norm1", "norm2", {"q_proj", "k_proj", "v_proj", "out_proj"}, {"linear1", "linear2"}, true},
        {"attention.",
         "",
         "attention.output.LayerNorm",
         "output.LayerNorm",
         {"self.query", "self.key", "self.value", "output.dense"},
         {"intermediate.dense", "output.dense"},
         true}};
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    for (const auto& r : rows) {
        INFO(r.attention << ", " << r.feed_forward << ", " << r.first_norm);
        parameters weights;
        const auto add = [&](const std::string& name, const parameters::extents& size) {
            add_random<float>(weights, "b." + name, size, static_cast<unsigned>(name.size()));
        };
        for (const auto& name : r.projections) add(r.attention + name + ".weight", {named_channels, named_channels});
        add(r.feed_forward + r.hidden[0] + ".weight", {named_hidden, named_channels});
        add(r.feed_forward + r.hidden[1] + ".weight", {named_channels, named_hidden});
        for (const auto& norm : {r.first_norm, r.second_norm})
            add(norm + ".weight", {named_channels}), add(norm + ".bias", {named_channels});
        const softmax_attention attention{.pattern = causal{}};
        const layer_norm<float> norm{.eps = 1e-3};
        const auto norm_of = [&](const std::string& name) {
            return layer_norm<float>{.weight = weights.get_vector<float>("b." + name + ".weight"),
                                     .bias = weights.get_vector<float>("b." + name + ".bias"),
                                     .eps = 1e-3};
        };
        const transformer_block by_hand{.attention_norm = norm_of(r.first_norm),
                                        .attention = get_multi_head<float>(weights, "b." + r.attention, named_heads, attention),
                                        .feed_forward_norm = norm_of(r.second_norm),
                                        .feed_forward = get_feed_forward<float>(weights, "b." + r.feed_forward, silu{}),
                                        .post_norm = r.post_norm};
        const auto named = get_transformer_block(std::as_const(weights), "b.", named_heads, norm, attention, silu{});
        CHECK(named.post_norm == r.post_norm);
        CHECK(same_bits(result_of(named, x), result_of(by_hand, x)));

        parameters gradients = zeros_like<float>(weights), wanted = zeros_like<float>(weights);
        differentiate(named, x, get_gradients(named, gradients, "b."));
        differentiate(by_hand, x,
                      {.attention_norm = get_gradients(norm, wanted, "b." + r.first_norm),
                       .attention = get_gradients(by_hand.attention, wanted, "b." + r.attention),
                       .feed_forward_norm = get_gradients(norm, wanted, "b." + r.second_norm),
                       .feed_forward = get_gradients(by_hand.feed_forward, wanted, "b." + r.feed_forward)});
        CHECK(joined(gradients, weights.names()) == joined(wanted, weights.names()));
        CHECK(std::ranges::count(joined(gradients, weights.names()), 0.0f) == 0);
        parameters gated = zeros_like<float>(weights); // a gate by another row's name than the other two
        gated.add<float>("b." + r.feed_forward + "w1.weight", {named_hidden, named_channels});
        CHECK(named_problem([&] {
                  (void)get_transformer_block(gated, "b.", named_heads, norm);
              }).starts_with("tensor \"b." + r.feed_forward + "w1.weight\" is none that"));
        weights.add<float>("b.norm3.weight", {named_channels});
        CHECK(named_problem([&] { (void)get_transformer_block(weights, "b.", named_heads, norm); }) ==
              "tensor \"b.norm3.weight\" is none that get_transformer_block knows: make the block of its parts");
        CHECK(named_problem([&] { (void)get_gradients(named, gradients, "c."); }).starts_with("tensor \"c.attn.q.weight\" is missing"));
    }
    parameters rms;
    add_random<float>(rms, "norm.weight", {named_channels}, 4);
    CHECK(get_norm<rms_norm<float>>(rms, "norm").weight.data() == rms.get_vector<float>("norm.weight").data());
    CHECK(named_problem([&] { (void)get_norm<rms_norm<float>>(rms, "last"); }) == "tensor \"last.weight\" is missing");
    CHECK(named_problem([&] {
              (void)get_transformer_block(rms, "x.", 2, rms_norm<float>{});
          }).starts_with("tensor \"x.attn.q.weight\" is missing, or \"x.mlp.up.weight\", and the block has no other names"));
}

TEST_CASE("named layers: numbers to begin with lie within their limits, are others for each name and seed, and the same again", "[layer]") {
    parameters once, again;
    for (auto* p : {&once, &again}) {
        for (const char* name : {"a.weight", "b.weight"}) p->add_initial<float>(name, {40, 25});
        p->add_initial<double>("patches.weight", {30, 4, 2, 2}, 7);
        p->add_initial<float>("a.bias", {40});
        p->add_initial<float>("norm.weight", {40});
    }
    const auto a = once.elements<float>("a.weight"), b = once.elements<float>("b.weight");
    CHECK(std::ranges::max(a) <= 0.2f);
    CHECK(std::ranges::max(a) > 0.19f);
    CHECK(std::ranges::min(a) >= -0.2f);
    CHECK(std::ranges::min(a) < -0.19f);
    CHECK(!std::ranges::equal(a, b));
    CHECK(std::ranges::equal(a, again.elements<float>("a.weight")));
    CHECK(std::abs(a[0] + 0.0732146278f) < 1e-8f); // on every machine
    CHECK(std::ranges::max(once.elements<double>("patches.weight")) > 0.24);
    CHECK(std::ranges::max(once.elements<double>("patches.weight")) < 0.25);
    CHECK(std::ranges::count(once.elements<float>("a.bias"), 0.0f) == 40);
    CHECK(std::ranges::count(once.elements<float>("norm.weight"), 1.0f) == 40);
    CHECK(again.add_initial<float>("c.weight", {0, 0}).shape().size() == 0);
    parameters other;
    other.add_initial<float>("a.weight", {40, 25}, 1);
    CHECK(!std::ranges::equal(a, other.elements<float>("a.weight")));
    CHECK(named_problem([&] { other.add_initial<float>("a.weight", {2, 2}); }) == "tensor \"a.weight\" is there already");
}

TEST_CASE("named gradients: what is not there, or of another type or size, is refused by name", "[layer]") {
    parameters weights, gradients;
    for (const char* name : {"a.q", "a.k", "a.v", "a.out"}) static_cast<void>(random_linear<float>(weights, name, 6, 6));
    const auto layer = get_multi_head<float>(weights, "a.", 2);
    const auto problem = [&] { return named_problem([&] { (void)get_gradients(layer, gradients, "a."); }); };
    CHECK(problem().starts_with("tensor \"a.q.weight\" is missing, and the layer has no other name of these: q, q_proj"));
    gradients.add<float>("a.qkv.weight", {17, 6});
    gradients.add<float>("a.out.weight", {6, 6});
    CHECK(problem() == "tensor \"a.qkv.weight\" has shape (17, 6), but its layer's weight has 18 outputs of 6 inputs");
    gradients = zeros_like<double>(weights);
    CHECK(problem() == "tensor \"a.q.weight\" holds double, and is written as that alone");
    gradients = {};
    for (const char* name : {"a.q", "a.k", "a.v", "a.out"}) gradients.add<float>(std::string(name) + ".weight", {6, 6});
    CHECK(get_gradients(layer, gradients, "a.").v.bias.empty());
    gradients.add<float>("a.v.bias", {5});
    CHECK(problem() == "tensor \"a.v.bias\" has 5 numbers, but its layer has 6 outputs");
    const layer_norm<float> norm;
    CHECK(named_problem([&] { (void)get_gradients(norm, gradients, "norm"); }) == "tensor \"norm.weight\" is missing");

    CHECK(named_problem([&] { (void)weights.writable<float>("none"); }) == "tensor \"none\" is missing");
    weights.add_bytes("count", {1}, "I64", std::string(8, '\0'));
    CHECK(named_problem([&] { (void)weights.writable<float>("count"); }) == "tensor \"count\" holds I64, and is written as that alone");
    CHECK(zeros_like<float>(weights).names().size() == 8);
    (void)weights.get<double>("a.q.weight", {6, 6});
    CHECK(named_problem([&] { (void)weights.writable<float>("a.q.weight"); }) ==
          "tensor \"a.q.weight\" has been converted to another type, which would not follow what is written");
}

TEST_CASE("named layers: what is not there, or there twice, or of another size, is refused by name", "[layer]") {
    parameters weights;
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 2); }) ==
          "tensor \"a.q.weight\" is missing, and the layer has no other name of these: q, q_proj, query, self.query, to_q, wq, qkv, Wqkv, "
          "qkv_proj, "
          "in_proj");
    CHECK(named_problem([&] { (void)get_feed_forward<float>(weights, "a."); }) ==
          "tensor \"a.up.weight\" is missing, and the layer has no other name of these: up, up_proj, w3, fc1_x, fc1, linear1, "
          "intermediate.dense");
    weights.add<float>("a.q.weight", {6, 5});
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 2); }) ==
          "tensor \"a.out.weight\" is missing, and the layer has no other name of these: out, out_proj, o_proj, o, proj, output.dense, "
          "to_out.0, wo");
    weights.add<float>("a.proj.weight", {5, 6});
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 2); }) == "tensor \"a.k.weight\" is missing");
    weights.add<float>("a.k.weight", {4, 5});
    weights.add<float>("a.v.weight", {3, 5});
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 4); }) ==
          "tensor \"a.q.weight\" has 6 outputs, which are not those of 4 heads of queries");
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 2); }) ==
          "tensor \"a.k.weight\" has 4 outputs, which are not those of 2 heads of queries");
    CHECK(error_of<argument_error>([&] { (void)get_multi_head<float>(weights, "a.", 0); }) ==
          "get_multi_head: heads are 0: one at least is needed");
    weights.add<float>("a.qkv.weight", {18, 5});
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "a.", 2); }) ==
          "tensor \"a.qkv.weight\" is there beside \"a.q\": which one is meant?");
    weights.add<float>("b.qkv.weight", {17, 5});
    weights.add<float>("b.proj.weight", {5, 6});
    CHECK(named_problem([&] { (void)get_multi_head<float>(weights, "b.", 2); }) ==
          "tensor \"b.qkv.weight\" has 17 outputs, which are not those of 2 heads of queries");
    weights.add<float>("b.fc1.weight", {8, 5});
    CHECK(named_problem([&] { (void)get_feed_forward<float>(weights, "b."); }) == "tensor \"b.fc2.weight\" is missing");
}

} // namespace attn::testing
