// Layers with states: a sequence in chunks has the bits of one call, and what is wrong is refused.
#include "allocations.hpp"
#include "block_checks.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "recurrent_checks.hpp"

#include <attn/attention/linear_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/layer/cached.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/norm/unit_norm.hpp>

#include <random>

namespace attn::testing {

namespace {

constexpr index_t stated_width = 20, stated_keys = 24, stated_values = 17;
constexpr state_layout stated_layout{.kv_heads = 2, .key_channels = stated_keys, .value_channels = stated_values};

/// What a block around any operator is made of: grouped heads, norms of queries and keys, rotary positions, a gate.
struct stated_parts {
    parameters weights;
    rotary<float> turns{400, stated_keys};
    multi_head<float> linears = random_multi_head<float>(weights, "attention", stated_width, 4, 2, stated_keys, stated_values);
    linear<float> gate = random_linear<float>(weights, "gate", 4, stated_width);
    layer_norm<float> norm1 = random_layer_norm(weights, "norm1", stated_width), norm2 = random_layer_norm(weights, "norm2", stated_width);
    feed_forward<float> mlp = random_feed_forward(weights, "mlp", stated_width, 33);

    template <class A>
    auto attention(const A& op) const {
        return multi_head<float, A, identity_reduction, unit_norm<float>>{.heads = 4,
                                                                          .kv_heads = 2,
                                                                          .q = linears.q,
                                                                          .k = linears.k,
                                                                          .v = linears.v,
                                                                          .out = linears.out,
                                                                          .attention = op,
                                                                          .rotation = &turns,
                                                                          .gate = gate};
    }
    template <class A>
    auto block(const A& op, bool post_norm = false) const {
        return transformer_block{
            .attention_norm = norm1, .attention = attention(op), .feed_forward_norm = norm2, .feed_forward = mlp, .post_norm = post_norm};
    }
};

/// Calls step(part) for the pieces of up to `longest` tokens that a sequence is cut into.
template <class Step>
void in_random_pieces(index_t tokens, index_t longest, unsigned seed, const Step& step) {
    std::mt19937 random(seed);
    for (index_t first = 0; first < tokens;) {
        const auto count = std::min(tokens - first, 1 + static_cast<index_t>(random()) % longest);
        step(tensor_part{.tokens = {first, count}});
        first += count;
    }
}

const tensor<float>& stated_taps() {
    static const auto taps = random_tensor<float>({1, stated_values, 1, 4}, 9);
    return taps;
}
simplified_linear_attention<causal> convolved() { return {.convolution = {.weights = stated_taps(), .causal = true}}; }

} // namespace

TEST_CASE("layers with states: however tokens are cut, a block of linear attention has the bits of one call", "[layer]") {
    const stated_parts parts;
    const auto x = random_tensor<float>({1, 1, 333, stated_width}, 1);
    const auto check = [&](const auto& op) {
        for (const bool post_norm : {false, true}) {
            const auto block = parts.block(op, post_norm);
            const auto exact = forward(block, {x});
            for_each_executor([&](auto& executor, const std::string& name) {
                const execution run(executor);
                for (const index_t longest : name == "sequential" ? std::vector<index_t>{7, 150, 400} : std::vector<index_t>{40}) {
                    INFO(op.name << (post_norm ? ", norms behind" : "") << ", " << name << ", up to " << longest << " tokens at once");
                    linear_state<float> state(op, stated_layout);
                    tensor<float> out(x.shape());
                    in_random_pieces(333, longest, static_cast<unsigned>(longest), [&](const tensor_part& part) {
                        forward(block, state, {x.slice(part)}, out.slice(part), run);
                        REQUIRE(state.size() == part.tokens.first + part.tokens.count);
                    });
                    CHECK(same_bits(out, exact));
                }
            });
        }
    };
    check(linear_attention{.pattern = causal{}});
    check(linear_attention{.feature_map = [](auto number) { return number * number; }, .pattern = causal{}, .normalise = false, .scale = 0.5});
    check(convolved());
}

TEST_CASE("layers with states: however tokens are cut, a block of recurrent attention has the bits of one call", "[layer]") {
    const stated_parts parts;
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 90, .key_dim = stated_keys, .value_dim = stated_values}},
                  [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
                      INFO(described);
                      const recurrent_tokens<float> terms(s);
                      const auto x = random_tensor<float>({2, 1, 90, stated_width}, 1);
                      const auto exact = terms.with_rule(kind, {}, [&](const auto& op) { return forward(parts.block(op), {x}); });
                      for_each_executor([&](auto& executor, const std::string& name) {
                          INFO(name);
                          const execution run(executor);
                          recurrent_state<float> state(s.state());
                          tensor<float> out(x.shape());
                          in_random_pieces(90, 23, static_cast<unsigned>(run.concurrency()), [&](const tensor_part& part) {
                              terms.with_rule(kind, {part.tokens.first, part.tokens.count}, [&](const auto& op) {
                                  forward(parts.block(op), state, {x.slice(part)}, out.slice(part), run);
                              });
                              REQUIRE(state.size() == part.tokens.first + part.tokens.count);
                          });
                          CHECK(same_bits(out, exact));
                      });
                  });
}

TEST_CASE("layers with states: the workspace that is said is enough, and no less is", "[layer]") {
    const stated_parts parts;
    const auto x = random_tensor<float>({1, 1, 200, stated_width}, 1);
    thread_pool pool(3);
    // layer_of(tokens), of these: the layer of a step.
    const auto check = [&](auto& state, const auto& layer_of) {
        const auto exact = forward(layer_of(row_range{0, 200}), {x});
        index_t first = 0;
        for (const index_t count : {1, 40, 1, 0, 100, 17, 1, 40}) {
            const tensor_part part{.tokens = {first, count}};
            const auto layer = layer_of(part.tokens);
            const layer_inputs<float> in{x.slice(part)};
            const auto bytes = workspace_bytes(layer, state, in, pool);
            INFO(bytes << " bytes for " << count << " tokens after " << first);
            tensor<float> out(in.tokens.shape());
            workspace less(bytes - 1), enough(bytes);
            fill(enough, std::byte{0xff});
            check_says(error_of([&] { forward(layer, state, in, out.view(), execution(pool, less)); }),
                       {std::string(layer.name), "workspace", std::to_string(bytes), "tokens", to_string(out.shape())});
            CHECK(state.size() == first);
            forward(layer, state, in, out.view(), execution(pool, enough));
            CHECK(same_bits(out, rows_of(exact, first, count)));
            first += count;
        }
    };
    const auto check_linear = [&](const auto& op) {
        linear_state<float> of_attention(op, stated_layout), of_block(op, stated_layout);
        check(of_attention, [&](const row_range&) { return parts.attention(op); });
        check(of_block, [&](const row_range&) { return parts.block(op); });
    };
    check_linear(linear_attention{.pattern = causal{}});
    check_linear(convolved());
    const auto decays = retention_log_decays<float>(2, 200);
    recurrent_state<float> state({1, 2, stated_keys, stated_values});
    check(state, [&](const row_range& tokens) {
        return parts.block(recurrent_attention{.rule = rule::gated<float>{decays.slice({.tokens = tokens})}});
    });
}

TEST_CASE("layers with states: a step allocates nothing", "[layer]") {
    const stated_parts parts;
    const auto x = random_tensor<float>({1, 1, 1, stated_width}, 1);
    const execution run;
    tensor<float> out(x.shape());
    const auto check = [&](const auto& op, auto&& state) {
        const auto block = parts.block(op);
        const auto steps = [&](int count) {
            for (; count > 0; --count) forward(block, state, {x}, out.view(), run);
        };
        steps(200);
        CHECK(allocations_in([&] { steps(200); }) == 0);
    };
    const auto taps = convolved();
    const auto decays = retention_log_decays<float>(2, 1);
    check(taps, linear_state<float>(taps, stated_layout));
    check(recurrent_attention{.rule = rule::gated{decays}}, recurrent_state<float>({1, 2, stated_keys, stated_values}));
}

TEST_CASE("layers with states: what a map or an executor throws takes no tokens from a linear state, and adds none", "[layer]") {
    const stated_parts parts;
    const auto x = random_tensor<float>({1, 1, 400, stated_width}, 1);
    index_t calls_left = -1; // before the map throws
    const linear_attention op{.feature_map =
                                  [&calls_left](auto number) {
                                      if (calls_left >= 0 && calls_left-- == 0) throw 5;
                                      return number * number;
                                  },
                              .pattern = causal{}};
    const auto block = parts.block(op);
    const auto exact = forward(block, {x});
    linear_state<float> state(op, stated_layout);
    tensor<float> out(x.shape());
    const fails_at failing;
    index_t failures = 0;
    const auto until_it_is_done = [&](const tensor_part& part, index_t& times_left, index_t step) {
        for (index_t time = 0;; time += step) {
            times_left = time;
            try {
                forward(block, state, {x.slice(part)}, out.slice(part), failing);
                times_left = -1;
                return;
            } catch (int) {
                ++failures;
                REQUIRE(state.size() == part.tokens.first);
            }
        }
    };
    until_it_is_done({.tokens = {0, 50}}, calls_left, 97);
    until_it_is_done({.tokens = {50, 20}}, calls_left, 13);
    const auto of_the_map = failures;
    until_it_is_done({.tokens = {70, 330}}, failing.time, 1);
    INFO(of_the_map << " failures of the map, " << failures - of_the_map << " of the executor");
    CHECK((of_the_map > 20 && failures - of_the_map > 3));
    CHECK(same_bits(out, exact));
}

TEST_CASE("layers with states: a recurrent state that a call lost is refused, and any other goes on", "[layer]") {
    const stated_parts parts;
    const recurrent_tokens<float> terms({.batch = 1, .heads = 4, .kv_heads = 2, .tokens = 400, .key_dim = stated_keys, .value_dim = stated_values});
    const auto x = random_tensor<float>({1, 1, 400, stated_width}, 1);
    const auto block_of = [&](const row_range& tokens) {
        const tensor_part part{.tokens = tokens};
        return parts.block(recurrent_attention{.rule = rule::gated_delta<float>{terms.log_decay.slice(part), terms.beta.slice(part)}});
    };
    const auto exact = forward(block_of({0, 400}), {x});
    const tensor_part begin{.tokens = {0, 40}}, rest{.tokens = {40, 360}};
    recurrent_state<float> first(terms.size.state());
    static_cast<void>(forward(block_of({0, 40}), first, {x.slice(begin)}));
    const fails_at failing;
    index_t lost = 0, taken = 0;
    for (index_t time = 0;; ++time) {
        auto state = first.fork();
        failing.time = time;
        try {
            const auto out = forward(block_of({40, 360}), state, {x.slice(rest)}, failing);
            CHECK(same_bits(out, rows_of(exact, 40, 360)));
            break;
        } catch (int) {
            taken += state.size() == 400;
            if (state.size() == 400) continue;
            const auto again = error_of([&] {
                const auto out = forward(block_of({40, 360}), state, {x.slice(rest)});
                CHECK(same_bits(out, rows_of(exact, 40, 360)));
            });
            lost += again != nothing_thrown;
            if (again != nothing_thrown) check_says(again, {"recurrent_state: state was left by a call that threw"});
        }
    }
    CHECK((lost > 0 && taken > 0));
}

TEST_CASE("layers with states: what is wrong is refused, and the state is as it was", "[layer]") {
    const stated_parts parts;
    const linear_attention op{.pattern = causal{}};
    const auto attention = parts.attention(op);
    const auto x = random_tensor<float>({1, 1, 100, stated_width}, 1), three = random_tensor<float>({1, 1, 3, stated_width}, 1),
               two = random_tensor<float>({2, 1, 3, stated_width}, 1), narrow = random_tensor<float>({1, 1, 3, stated_width - 1}, 1);
    const auto said = [](const auto& layer, auto& to, const layer_inputs<float>& in) {
        return error_of([&] { static_cast<void>(forward(layer, to, in)); });
    };
    linear_state<float> state(op, stated_layout);
    const auto exact = forward(attention, {x});
    const tensor_part begin{.tokens = {0, 50}}, rest{.tokens = {50, 50}};
    CHECK(same_bits(forward(attention, state, {x.slice(begin)}), rows_of(exact, 0, 50)));
    check_says(said(attention, state, {two}), {"multi_head", "tokens", "(2, 1, 3, 20)", "one sequence"});
    check_says(said(attention, state, {narrow}), {"multi_head", "tokens", "(1, 1, 3, 19)"});
    check_says(said(attention, state, {.tokens = three, .context = x}), {"multi_head", "context", "a state is of the tokens"});
    check_says(said(attention, state, {.tokens = three, .positions = top_left()}), {"multi_head", "positions", "a cache has those of the tokens"});
    tensor<float> too_many({1, 1, 351, stated_width});
    check_says(said(attention, state, {too_many}), {"multi_head", "q", "positions 50 to 400", "0 to 399"});
    const auto with_taps = parts.attention(convolved());
    check_says(said(with_taps, state, {three}), {"simplified_linear_attention", "state", "another operator"});
    auto sized = convolved();
    linear_state<float> of_taps(sized, stated_layout);
    static_cast<void>(forward(with_taps, of_taps, {three}));
    sized.convolution.height = 1, sized.convolution.width = 3; // the grid of these tokens, but not of all
    check_says(said(parts.attention(sized), of_taps, {three}), {"simplified_linear_attention", "height", "1 and 3", "(1, 2, 6, 17)"});
    sized = convolved();
    sized.positional_encoding = stated_taps();
    CHECK(said(parts.attention(sized), of_taps, {three}) != nothing_thrown);
    CHECK(of_taps.size() == 3);
    linear_state<float> wrong(op, {.kv_heads = 2, .key_channels = stated_keys + 1, .value_channels = stated_values}),
        other(op, {.kv_heads = 2, .key_channels = stated_keys, .value_channels = 3});
    check_says(said(attention, wrong, {three}), {"linear_state::append", "keys", "(1, 2, 3, 24)", "(1, 2, 3, 25)"});
    check_says(said(attention, other, {three}), {"linear_state::append", "values", "(1, 2, 3, 17)", "(1, 2, 3, 3)"});
    CHECK((state.size() == 50 && wrong.size() == 0 && other.size() == 0));
    CHECK(same_bits(forward(attention, state, {x.slice(rest)}), rows_of(exact, 50, 50)));
}

TEST_CASE("layers with states: what is wrong of a recurrent layer is refused, and the state is as it was", "[layer]") {
    const stated_parts parts;
    const auto x = random_tensor<float>({2, 1, 40, stated_width}, 1);
    const auto decays = retention_log_decays<float>(2, 40);
    const auto layer_of = [&](const row_range& tokens) {
        return parts.attention(recurrent_attention{.rule = rule::gated<float>{decays.slice({.tokens = tokens})}});
    };
    const auto exact = forward(layer_of({0, 40}), {x});
    const auto part = [&](const row_range& tokens) { return layer_inputs<float>{x.slice({.tokens = tokens})}; };
    const auto said = [](const auto& layer, auto& to, const layer_inputs<float>& in) {
        return error_of([&] { static_cast<void>(forward(layer, to, in)); });
    };
    recurrent_state<float> state({2, 2, stated_keys, stated_values}), of_one({1, 2, stated_keys, stated_values});
    CHECK(same_bits(forward(layer_of({0, 20}), state, part({0, 20})), rows_of(exact, 0, 20)));
    check_says(said(layer_of({20, 20}), of_one, part({20, 20})), {"recurrent_attention", "state", "(1, 2, 24, 17)", "(2, 2, 20, 24)"});
    check_says(said(layer_of({20, 19}), state, part({20, 20})), {"recurrent_attention", "rule.log_decay", "(1, 2, 19, 1)", "(2, 2, 20, 24)"});
    check_says(said(parts.attention(recurrent_attention{.rule = rule::linear<float>{}}), state, part({20, 20})), {"recurrent_attention", "rule", "another"});
    auto in = part({20, 20});
    in.context = x;
    check_says(said(layer_of({20, 20}), state, in), {"multi_head", "context", "a state is of the tokens"});
    in = part({20, 20});
    in.positions = top_left();
    check_says(said(layer_of({20, 20}), state, in), {"multi_head", "positions"});
    auto begun = layer_of({20, 20});
    const tensor<float> sums(state.shape());
    begun.attention.first_state = sums;
    check_says(said(begun, state, part({20, 20})), {"recurrent_attention", "first_state", "a state has its own"});
    CHECK((state.size() == 20 && of_one.size() == 0));
    CHECK(same_bits(forward(layer_of({20, 20}), state, part({20, 20})), rows_of(exact, 20, 20)));
}

} // namespace attn::testing
