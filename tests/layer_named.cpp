// Layers by the names of others' files: the layer that the linears make, whatever they are called, and every way to be wrong.
#include "catch.hpp"
#include "layer_checks.hpp"

#include <attn/layer/named_layers.hpp>
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

} // namespace

TEST_CASE("named layers: attention is what its linears make, by each of their names", "[layer]") {
    const auto x = random_rows<float>({2, 1, 5, named_channels}, 3);
    using names = std::array<std::string, 3>;
    const std::vector<std::pair<names, std::string>> files{{{"q", "k", "v"}, "out"},
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
    for (const auto& [own, out] : files)
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
    using names = std::array<std::string, 3>;
    for (const auto& own : {names{"up", "down", "gate"}, names{"up", "down", ""}, names{"up_proj", "down_proj", "gate_proj"},
                            names{"w3", "w2", "w1"}, names{"fc1_x", "fc2", "fc1_g"}, names{"fc1", "fc2", ""},
                            names{"linear1", "linear2", ""}, names{"intermediate.dense", "output.dense", ""}}) {
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
