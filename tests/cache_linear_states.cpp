// States of causal linear attention: the bits of the whole call, however a sequence is cut, and what is refused.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "storage.hpp"

#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/cache/linear_state.hpp>

#include <random>

namespace attn::testing {

namespace {

template <Scalar T>
struct stated_tokens {
    tensor<T> queries, keys, values;

    stated_tokens(index_t count, index_t d_k, index_t d_v, unsigned seed = 1)
        : queries(random_tensor<T>({1, 4, count, d_k}, seed)), keys(random_tensor<T>({1, 2, count, d_k}, seed + 1)),
          values(random_tensor<T>({1, 2, count, d_v}, seed + 2)) {}
    state_layout layout() const {
        return {.kv_heads = 2, .key_channels = keys.shape().channels, .value_channels = values.shape().channels};
    }
    index_t count() const { return keys.shape().tokens; }
    void append_to(linear_state<T>& to, index_t first, index_t more, const detail::call_execution& run = {}) const {
        const tensor_part part{.tokens = {first, more}};
        to.append(keys.slice(part), values.slice(part), run);
    }
    tensor_view<const T> queries_of(index_t first, index_t more) const { return queries.slice({.tokens = {first, more}}); }
};

/// A sequence in pieces of up to `longest` tokens, some of whose queries attend, has the bits of the whole call.
template <class Op, Scalar T>
void check_pieces(const Op& op, const stated_tokens<T>& all, index_t longest, const execution& run, unsigned seed) {
    const auto exact = attend(op, all.queries, all.keys, all.values);
    std::mt19937 random(seed);
    linear_state<T> state(op, all.layout());
    for (index_t first = 0; first < all.count();) {
        const auto more = std::min(all.count() - first, 1 + static_cast<index_t>(random()) % longest);
        all.append_to(state, first, more, run);
        first += more;
        REQUIRE(state.size() == first);
        const auto asked = random() % 3 == 0 ? static_cast<index_t>(random()) % (more + 1) : more;
        INFO(asked << " queries of " << more << " tokens before " << first);
        REQUIRE(same_bits(attend(op, all.queries_of(first - asked, asked), state, run), rows_of(exact, first - asked, asked)));
    }
}

template <Scalar T>
struct taps {
    tensor<T> weights;
    std::vector<T> bias;

    taps(index_t heads, index_t channels, index_t width)
        : weights(random_tensor<T>({heads, channels, 1, width}, 9)), bias(static_cast<std::size_t>(channels), T(0.25)) {}
    simplified_linear_attention<causal, T> op() const { return {.convolution = {.weights = weights, .bias = bias, .causal = true}}; }
};

} // namespace

TEMPLATE_TEST_CASE("linear_state: several in one call have the bits of a call for each", "[cache][linear][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const taps<T> convolution(1, 6, 4);
    const auto check = [&](const auto& op) {
        const stated_tokens<T> tokens(70, 9, 6);
        std::vector<linear_state<T>> states;
        std::vector<const linear_state<T>*> each;
        for (const index_t count : {40, 1, 70}) tokens.append_to(states.emplace_back(op, tokens.layout()), 0, count);
        for (const auto& state : states) each.push_back(&state);
        const std::vector<index_t> starts{0, 33, 33, 52}; // queries of the last tokens of each
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            auto ours = no_answer<T>({1, 4, 52, 6}, false);
            attend(op, tokens.queries_of(0, 52), linear_state_batch<T>{each, starts}, ours.out(), executor);
            for (std::size_t e = 0; e < 3; ++e) {
                const auto count = starts[e + 1] - starts[e];
                const auto alone = attend(op, tokens.queries_of(starts[e], count), states[e]);
                CHECK(same_bits(alone, rows_of(ours.values, starts[e], count)));
            }
            auto of_one = no_answer<T>({1, 4, 3, 6}, false);
            attend(op, tokens.queries_of(0, 3), linear_state_batch<T>{each}, of_one.out(), executor);
            for (index_t e = 0; e < 3; ++e)
                CHECK(same_bits(attend(op, tokens.queries_of(e, 1), *each[static_cast<std::size_t>(e)]), rows_of(of_one.values, e, 1)));
        });
    };
    check(linear_attention{.pattern = causal{}});
    check(convolution.op());
}

TEST_CASE("linear_state: a batch that does not fit is refused, and nothing is written", "[cache][linear][errors]") {
    const linear_attention op{.pattern = causal{}};
    const stated_tokens<float> tokens(8, 4, 4);
    linear_state<float> state(op, tokens.layout());
    tokens.append_to(state, 0, 2);
    const std::vector<const linear_state<float>*> twice{&state, &state}, one_missing{&state, nullptr};
    const std::vector<index_t> starts{0, 1, 4};
    const auto says = [&](index_t queries, const linear_state_batch<float>& batch, std::vector<std::string> words) {
        tensor<float> out({1, 4, queries, 4});
        std::fill_n(out.data(), out.shape().size(), 7.f);
        check_says(error_of([&] { attend(op, tokens.queries_of(0, queries), batch, outputs<float>{out}); }), words);
        CHECK(std::all_of(out.data(), out.data() + out.shape().size(), [](float x) { return x == 7.f; }));
    };
    says(3, {twice}, {"linear_attention", "sequences", "2", "3"});
    says(2, {one_missing}, {"linear_attention", "sequences", "null"});
    says(4, {twice, starts}, {"linear_attention", "q", "3", "2 tokens"});
}

TEMPLATE_TEST_CASE("linear_state: pieces of a sequence have the bits of the whole call, wherever it is cut", "[cache][linear][portable]",
                   ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        const execution run(executor);
        unsigned seed = 0;
        for (const auto& [d_k, d_v] : {std::pair<index_t, index_t>{8, 5}, {64, 32}, {17, 70}}) {
            const stated_tokens<T> all(333, d_k, d_v);
            const taps<T> short_taps(1, d_v, 4), long_taps(4, d_v, 40);
            for (const index_t longest : name == "sequential" ? std::vector<index_t>{1, 7, 150} : std::vector<index_t>{40}) {
                INFO(d_k << " and " << d_v << " channels, up to " << longest << " tokens at once");
                check_pieces(linear_attention{.pattern = causal{}}, all, longest, run, ++seed);
                check_pieces(
                    linear_attention{.feature_map = [](auto x) { return x * x; }, .pattern = causal{}, .normalise = false, .scale = 0.5},
                    all, longest, run, ++seed);
                check_pieces(short_taps.op(), all, longest, run, ++seed);
                check_pieces(long_taps.op(), all, longest, run, ++seed);
            }
        }
        check_pieces(simplified_linear_attention<causal, T>{}, stated_tokens<T>(600, 8, 8), 300, run, 99);
    });
}

TEST_CASE("linear_state: 16-bit keys, values and results are those of one call", "[cache][linear][portable]") {
    const taps<float> kernel(1, 6, 3);
    const auto op = kernel.op();
    for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
        const stated_tokens<float> all(100, 7, 6);
        const auto narrow = [&](const tensor<float>& t) {
            tensor<float> copied(t.shape());
            std::copy_n(t.data(), t.shape().size(), copied.data());
            return stored_tensor(std::move(copied), format, layout::token_major);
        };
        auto q = narrow(all.queries), k = narrow(all.keys), v = narrow(all.values), out = narrow(tensor<float>({1, 4, 100, 6}));
        const auto exact = attend(op, inputs<float>{q.view(), k.view(), v.view()});
        linear_state<float> state(op, all.layout());
        for (index_t first = 0; first < 100; first += 20) {
            const tensor_part part{.tokens = {first, 20}};
            state.append(k.view().slice(part), v.view().slice(part));
            attend(op, q.view().slice(part), state, outputs<float>{out.view().slice(part)});
        }
        CHECK(out.holds(exact));
    }
}

TEMPLATE_TEST_CASE("linear_state: a fork and what it came from go their own ways", "[cache][linear][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const stated_tokens<T> all(200, 8, 8), other(200, 8, 8, 7);
    const taps<T> kernel(1, 8, 4);
    const auto op = kernel.op();
    linear_state<T> first(op, all.layout());
    all.append_to(first, 0, 60);
    all.append_to(first, 60, 30); // some are summed, some are not
    auto second = first.fork();
    all.append_to(first, 90, 110);
    other.append_to(second, 90, 50);
    CHECK((first.size() == 200 && second.size() == 140));
    const auto both = [&](const tensor<T>& a, const tensor<T>& b) {
        auto joined = rows_of(a, 0, 140);
        detail::for_each_number(joined.shape(), [&](index_t n, index_t h, index_t i, index_t c) {
            if (i >= 90) joined(n, h, i, c) = b(n, h, i, c);
        });
        return joined;
    };
    const auto exact = attend(op, both(all.queries, other.queries), both(all.keys, other.keys), both(all.values, other.values));
    CHECK(same_bits(attend(op, all.queries_of(199, 1), first), rows_of(attend(op, all.queries, all.keys, all.values), 199, 1)));
    CHECK(same_bits(attend(op, other.queries_of(90, 50), second), rows_of(exact, 90, 50)));
    auto moved = std::move(second);
    second = std::move(first);
    CHECK((moved.size() == 140 && second.size() == 200));
    CHECK(same_bits(attend(op, other.queries_of(139, 1), moved), rows_of(exact, 139, 1)));
}

TEMPLATE_TEST_CASE("linear_state: drafts are dropped, what is summed is not", "[cache][linear][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const stated_tokens<T> all(300, 8, 8), draft(300, 8, 8, 7);
    const taps<T> kernel(1, 8, 4);
    const auto op = kernel.op();
    const auto exact = attend(op, all.queries, all.keys, all.values);
    linear_state<T> state(op, all.layout());
    std::mt19937 random(5);
    for (index_t first = 0; first < 260;) {
        draft.append_to(state, first, 40);
        state.truncate(first);
        const auto more = static_cast<index_t>(1 + random() % 40), dropped = static_cast<index_t>(random() % static_cast<unsigned>(more));
        all.append_to(state, first, more);
        first += more - dropped;
        state.truncate(first);
        INFO(first << " tokens");
        REQUIRE(same_bits(attend(op, all.queries_of(first - 1, 1), state), rows_of(exact, first - 1, 1)));
    }
    const auto before = state.size();
    check_says(error_of<argument_error>([&] { state.truncate(100); }),
               {"linear_state::truncate", "tokens", "are 100", "only tokens of the last append"});
    check_says(error_of<argument_error>([&] { state.truncate(before + 1); }), {"linear_state::truncate", "tokens", "but the state has"});
    check_says(error_of<argument_error>([&] { state.truncate(-1); }), {"linear_state::truncate", "tokens", "are -1"});
    CHECK(state.size() == before);
    state.truncate(0);
    CHECK(state.size() == 0);
    all.append_to(state, 0, 300);
    CHECK(same_bits(attend(op, all.queries, state), exact));
}

TEST_CASE("linear_state: a step allocates nothing", "[cache][linear]") {
    const stated_tokens<float> all(1000, 64, 64);
    const taps<float> kernel(1, 64, 4);
    const auto op = kernel.op();
    const execution run;
    linear_state<float> state(op, all.layout());
    tensor<float> out({1, 4, 1, 64});
    const auto step = [&](index_t token) {
        all.append_to(state, token, 1, run);
        attend(op, all.queries_of(token, 1), state, outputs<float>{out}, run);
    };
    index_t token = 0;
    for (; token < 500; ++token) step(token);
    CHECK(allocations_in([&] {
              for (; token < 1000; ++token) step(token);
          }) == 0);
}

TEST_CASE("linear_state: what an executor or a map throws leaves it as it was", "[cache][linear][portable]") {
    const stated_tokens<float> all(100, 8, 8);
    int calls_left = -1; // before the map throws: some blocks are summed by then
    const linear_attention op{.feature_map =
                                  [&calls_left](auto x) {
                                      if (calls_left >= 0 && calls_left-- == 0) throw 5;
                                      return x * x;
                                  },
                              .pattern = causal{}};
    linear_state<float> state(op, all.layout());
    all.append_to(state, 0, 90);
    calls_left = 100;
    CHECK_THROWS_AS(all.append_to(state, 90, 10), int);
    CHECK(state.size() == 90);
    workspace little(64);
    sequential one;
    const execution run(one, little);
    check_says(error_of<argument_error>([&] { all.append_to(state, 90, 10, run); }), {"linear_state::append", "workspace", "has 64 bytes"});
    check_says(error_of<argument_error>([&] { static_cast<void>(attend(op, all.queries_of(89, 1), state, run)); }),
               {"linear_attention", "workspace", "has 64 bytes"});
    CHECK(state.size() == 90);
    all.append_to(state, 90, 10);
    CHECK(same_bits(attend(op, all.queries_of(90, 10), state), rows_of(attend(op, all.queries, all.keys, all.values), 90, 10)));
}

TEST_CASE("linear_state: what cannot be right is refused", "[cache][linear][errors]") {
    using detail::HasLinearState;
    static_assert(HasLinearState<linear_attention<elu_plus_one, causal>, float>);
    static_assert(HasLinearState<simplified_linear_attention<causal, double>, double>);
    static_assert(!HasLinearState<linear_attention<>, float> && !HasLinearState<simplified_linear_attention<>, float>);
    static_assert(!HasLinearState<focused_linear_attention<>, float> && !HasLinearState<softmax_attention<causal>, float>);

    const stated_tokens<float> all(60, 8, 8);
    const linear_attention op{.pattern = causal{}};
    const auto layout_error = [&](const state_layout& layout) {
        return error_of<argument_error>([&] { linear_state<float>(op, layout); });
    };
    check_says(layout_error({.kv_heads = 0, .key_channels = 8, .value_channels = 8}), {"linear_state", "kv_heads", "is 0"});
    check_says(layout_error({.kv_heads = 2, .value_channels = 8}), {"linear_state", "key_channels", "is 0"});
    check_says(layout_error({.kv_heads = 2, .key_channels = 8, .value_channels = -1}), {"linear_state", "value_channels", "is -1"});
    check_says(layout_error({.kv_heads = 1 << 20, .key_channels = 1 << 20, .value_channels = 1 << 20}),
               {"linear_state", "kv_heads", "more than 2^48 bytes"});

    linear_state<float> state(op, all.layout());
    check_says(error_of<shape_error>([&] { static_cast<void>(attend(op, all.queries, state)); }),
               {"linear_attention", "q", "(1, 4, 60, 8)", "has 0 tokens"});
    const auto append_error = [&](const shape& k, const shape& v) {
        const tensor<float> keys(k), values(v);
        return error_of<shape_error>([&] { state.append(keys, values); });
    };
    check_says(append_error({1, 3, 1, 8}, {1, 2, 1, 8}), {"linear_state::append", "keys", "(1, 3, 1, 8)", "(1, 2, 1, 8)"});
    check_says(append_error({2, 2, 1, 8}, {1, 2, 1, 8}), {"linear_state::append", "keys", "(2, 2, 1, 8)"});
    check_says(append_error({1, 2, 1, 8}, {1, 2, 1, 7}), {"linear_state::append", "values", "(1, 2, 1, 7)", "(1, 2, 1, 8)"});
    check_says(append_error({1, 2, 1, 8}, {1, 2, 2, 8}), {"linear_state::append", "values", "(1, 2, 2, 8)", "(1, 2, 1, 8)"});
    CHECK(state.size() == 0);

    all.append_to(state, 0, 40);
    all.append_to(state, 40, 20);
    const auto attend_error = [&](const auto& with, const shape& q) {
        const tensor<float> queries(q);
        return error_of([&] { static_cast<void>(attend(with, queries, state)); });
    };
    check_says(attend_error(op, {2, 4, 1, 8}), {"linear_attention", "q", "(2, 4, 1, 8)", "one batch entry"});
    check_says(attend_error(op, {1, 4, 61, 8}), {"linear_attention", "q", "(1, 4, 61, 8)", "has 60 tokens"});
    check_says(attend_error(op, {1, 4, 50, 8}), {"linear_attention", "q", "(1, 4, 50, 8)", "the first 32", "last append"});
    check_says(attend_error(op, {1, 3, 1, 8}), {"linear_attention", "(1, 3, "});
    check_says(attend_error(op, {1, 4, 1, 7}), {"linear_attention", "7"});
    check_says(attend_error(simplified_linear_attention<causal>{}, {1, 4, 1, 8}),
               {"simplified_linear_attention", "state", "another operator"});
    tensor<float> out({1, 4, 1, 7});
    check_says(error_of<shape_error>([&] { attend(op, all.queries_of(59, 1), state, outputs<float>{out}); }),
               {"linear_attention", "out", "(1, 4, 1, 7)"});

    const taps<float> narrow(1, 8, 3), wide(1, 8, 4);
    auto convolved = narrow.op();
    linear_state<float> other(convolved, all.layout());
    all.append_to(other, 0, 60);
    check_says(error_of<argument_error>([&] { static_cast<void>(attend(wide.op(), all.queries_of(59, 1), other)); }),
               {"state", "another operator"});
    const auto made = [&](const auto& from) {
        const auto error = error_of<argument_error>([&] { linear_state<float>(from, all.layout()); });
        CHECK(error_of<argument_error>([&] { static_cast<void>(attend(from, all.queries_of(59, 1), other)); }) != nothing_thrown);
        return error;
    };
    const taps<float> none(1, 8, 0);
    linear_state<float> of_none(none.op(), all.layout());
    all.append_to(of_none, 0, 32);
    all.append_to(of_none, 32, 28);
    check_says(error_of<shape_error>([&] { static_cast<void>(attend(none.op(), all.queries_of(59, 1), of_none)); }),
               {"simplified_linear_attention", "weights", "(1, 8, 1, 0)"});
    convolved.convolution.causal = false;
    check_says(made(convolved), {"linear_state", "convolution", "is not causal"});
    convolved = narrow.op();
    convolved.convolution_input = all.values;
    check_says(made(convolved), {"linear_state", "convolution_input", "of all tokens"});
    convolved = narrow.op();
    convolved.positional_encoding = all.keys;
    check_says(made(convolved), {"linear_state", "positional_encoding", "add it to the keys"});
}

} // namespace attn::testing
