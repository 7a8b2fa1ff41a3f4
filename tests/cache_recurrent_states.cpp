// States of recurrent attention: the bits of the whole call, however a sequence is cut, and what is refused.
#include "allocations.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "recurrent_checks.hpp"
#include "storage.hpp"

#include <attn/cache/recurrent_state.hpp>

#include <random>

namespace attn::testing {

namespace {

constexpr recurrent_sizes stated_sizes{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 90, .key_dim = 7, .value_dim = 20};

/// Some tokens of a sequence, which attend to the state, or are appended to it.
template <Scalar T>
void take(recurrent_state<T>& state, const recurrent_tokens<T>& tokens, recurrent_rule kind, const token_range& range, tensor<T>& out,
          const detail::call_execution& run = {}) {
    tokens.with_rule(kind, range, [&](const auto& op) {
        attn::attend(op, tokens.in(range), outputs<T>{out.slice({.tokens = {range.first, range.count}})}, state, run);
    });
}
template <Scalar T>
void append(recurrent_state<T>& state, const recurrent_tokens<T>& tokens, recurrent_rule kind, const token_range& range) {
    const auto in = tokens.in(range);
    tokens.with_rule(kind, range, [&](const auto& op) { state.append(op, in.keys, in.values); });
}

/// Whether rows from `first` on, so many, have the same bits.
template <Scalar T>
bool same_rows(const tensor<T>& x, const tensor<T>& y, index_t first, index_t count) {
    bool same = x.shape() == y.shape();
    detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        if (i >= first && i < first + count) same &= same_bits(x(b, h, i, c), y(b, h, i, c));
    });
    return same;
}

} // namespace

TEMPLATE_TEST_CASE("recurrent_state: a sequence has the bits of the whole call, wherever it is cut", "[cache][recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    thread_pool pool(3);
    for_each_rule({stated_sizes, {.heads = 9, .kv_heads = 1, .tokens = 40, .key_dim = 33, .value_dim = 5}, {.heads = 2, .kv_heads = 2, .tokens = 70, .key_dim = 64, .value_dim = 64}},
                         [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
                             INFO(described);
                             const recurrent_tokens<T> tokens(s);
                             const auto whole = attend(tokens, kind, false), from_first = attend(tokens, kind, true);
                             for (const index_t longest : {1, 3, 15, 16, 17, 40}) {
                                 INFO("up to " << longest << " tokens at once");
                                 std::mt19937 random(static_cast<unsigned>(longest));
                                 recurrent_answer<T> ours(s);
                                 const bool begins = longest % 2 == 1;
                                 auto state = begins ? recurrent_state<T>(tokens.first_state) : recurrent_state<T>(s.state());
                                 for (index_t first = 0; first < s.tokens;) {
                                     const auto count = std::min(s.tokens - first, 1 + static_cast<index_t>(random()) % longest);
                                     take(state, tokens, kind, {first, count}, ours.values, random() % 2 == 0 ? detail::call_execution(pool) : detail::call_execution());
                                     first += count;
                                     REQUIRE(state.size() == first);
                                 }
                                 ours.last = state.sums();
                                 CHECK(same_bits(ours, begins ? from_first : whole));
                             }
                         });
}

TEMPLATE_TEST_CASE("recurrent_state: tokens that nobody queries leave the same state", "[cache][recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({stated_sizes}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const auto whole = attend(tokens, kind, false);
        recurrent_answer<T> ours(s);
        recurrent_state<T> state(s.state());
        append(state, tokens, kind, {0, 0});
        append(state, tokens, kind, {0, 21});
        take(state, tokens, kind, {21, 0}, ours.values);
        append(state, tokens, kind, {21, 40});
        append(state, tokens, kind, {61, 1});
        CHECK(state.size() == 62);
        take(state, tokens, kind, {62, 28}, ours.values);
        CHECK(same_rows(ours.values, whole.values, 62, 28));
        CHECK(same_bits(state.sums(), whole.last));
        // What a state has is asked for between two tokens as well, and goes on from there to rounding.
        recurrent_state<T> asked(s.state());
        append(asked, tokens, kind, {0, 37});
        auto moved = recurrent_state<T>(asked.sums());
        append(moved, tokens, kind, {37, 53});
        append(asked, tokens, kind, {37, 53});
        CHECK(moved.size() == 53);
        const auto exact = reference_of(tokens, kind, false);
        CHECK(largest_error(moved.sums(), exact.last) <= 100 * epsilon<T> * largest_magnitude(exact.last));
        CHECK(same_bits(asked.sums(), whole.last));
    });
}

TEMPLATE_TEST_CASE("recurrent_state: a fork and what it came from go their own ways", "[cache][recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({stated_sizes}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        recurrent_tokens<T> draft(s, 30);
        const auto whole = attend(tokens, kind, false);
        for (const index_t border : {32, 41}) {
            INFO("forked after " << border << " tokens");
            recurrent_answer<T> ours(s), others(s);
            recurrent_state<T> state(s.state());
            append(state, tokens, kind, {0, border});
            auto other = state.fork();
            CHECK((other.size() == border && other.shape() == s.state()));
            for (index_t first = border; first < s.tokens; first += 7) { // in turns
                const auto count = std::min<index_t>(7, s.tokens - first);
                take(other, draft, kind, {first, count}, others.values);
                take(state, tokens, kind, {first, count}, ours.values);
            }
            CHECK(same_rows(ours.values, whole.values, border, s.tokens - border));
            CHECK(same_bits(state.sums(), whole.last));
            // The other is what comes of the tokens that it had.
            const auto join = [&](tensor<T>& to, const tensor<T>& from) {
                detail::for_each_number(to.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
                    if (i < border) to(b, h, i, c) = from(b, h, i, c);
                });
            };
            recurrent_tokens<T> joined(s, 30);
            join(joined.queries, tokens.queries), join(joined.keys, tokens.keys), join(joined.values, tokens.values);
            join(joined.log_decay, tokens.log_decay), join(joined.beta, tokens.beta), join(joined.a, tokens.a), join(joined.b, tokens.b);
            const auto exact = attend(joined, kind, false);
            CHECK(same_rows(others.values, exact.values, border, s.tokens - border));
            CHECK(same_bits(other.sums(), exact.last));
            auto moved = std::move(other);
            other = std::move(state);
            CHECK(same_bits(moved.sums(), exact.last));
            CHECK(same_bits(other.sums(), whole.last));
        }
    });
}

TEST_CASE("recurrent_state: 16-bit tokens and results are those of one call", "[cache][recurrent][portable]") {
    const recurrent_tokens<float> tokens(stated_sizes);
    for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
        const auto narrow = [&](const tensor<float>& t) {
            tensor<float> copied(t.shape());
            std::copy_n(t.data(), t.shape().size(), copied.data());
            return stored_tensor(std::move(copied), format, layout::token_major);
        };
        auto q = narrow(tokens.queries), k = narrow(tokens.keys), v = narrow(tokens.values), out = narrow(tensor<float>({2, 4, 90, 20}));
        const auto exact = attend(recurrent_attention{.rule = rule::gated_delta{tokens.log_decay, tokens.beta}}, inputs<float>{q.view(), k.view(), v.view()});
        recurrent_state<float> state(stated_sizes.state());
        for (index_t first = 0; first < 90; first += 10) {
            const tensor_part part{.tokens = {first, 10}};
            const recurrent_attention op{.rule = rule::gated_delta<float>{tokens.log_decay.slice(part), tokens.beta.slice(part)}};
            attend(op, inputs<float>{q.view().slice(part), k.view().slice(part), v.view().slice(part)}, outputs<float>{out.view().slice(part)}, state);
        }
        CHECK(out.holds(exact));
    }
}

TEST_CASE("recurrent_state: a step allocates nothing", "[cache][recurrent]") {
    const recurrent_tokens<float> tokens({.heads = 4, .kv_heads = 2, .tokens = 100, .key_dim = 64, .value_dim = 64});
    const execution run;
    for (const auto [kind, name] : all_rules) {
        INFO(name);
        recurrent_state<float> state(tokens.size.state());
        tensor<float> out({1, 4, 100, 64});
        index_t token = 0;
        for (; token < 50; ++token) take(state, tokens, kind, {token, 1}, out, run);
        CHECK(allocations_in([&] {
                  for (; token < 100; ++token) take(state, tokens, kind, {token, 1}, out, run);
              }) == 0);
    }
}

TEST_CASE("recurrent_state: what cannot be right is refused, and changes nothing", "[cache][recurrent][portable]") {
    CHECK(error_of([] { recurrent_state<float>({1, 2, 0, 4}); }) == "recurrent_state: shape is (1, 2, 0, 4): keys need at least one channel");
    check_says(error_of([] { recurrent_state<float>({1, -2, 3, 4}); }), {"recurrent_state: shape"});

    recurrent_tokens<float> t(stated_sizes);
    const auto whole = attend(t, recurrent_rule::gated_delta, false);
    recurrent_answer<float> ours(stated_sizes);
    recurrent_state<float> state(stated_sizes.state());
    take(state, t, recurrent_rule::gated_delta, {0, 37}, ours.values);
    const auto sums = state.sums();

    const token_range next{37, 10};
    const tensor_part part{.tokens = {37, 10}};
    const recurrent_attention op{.rule = rule::gated_delta<float>{t.log_decay.slice(part), t.beta.slice(part)}};
    const auto refused = [&](const auto& by, const inputs<float>& in, const tensor_view<float>& out) {
        return error_of([&] { attend(by, in, outputs<float>{out}, state); });
    };
    const auto out = ours.values.slice(part);
    const auto in = t.in(next);
    const std::string other_rule = "recurrent_attention: rule is another than that of the tokens that the state has taken";
    CHECK(refused(recurrent_attention{.rule = rule::linear<float>{}}, in, out) == other_rule);
    CHECK(refused(recurrent_attention{.rule = rule::general<float>{t.log_decay.slice(part), t.a.slice(part), t.b.slice(part)}}, in, out) == other_rule);
    CHECK(refused(recurrent_attention{.rule = rule::gated<float>{t.a.slice(part)}}, in, out) != nothing_thrown); // by channel, and some are positive

    tensor<float> other({2, 2, 7, 20}), wide_values({2, 2, 10, 21}), wide_out({2, 4, 10, 21});
    CHECK(refused(recurrent_attention{.rule = op.rule, .first_state = other}, in, out) ==
          "recurrent_attention: first_state is given, but a call that goes on from a state has its own");
    CHECK(refused(recurrent_attention{.rule = op.rule, .last_state = other}, in, out) ==
          "recurrent_attention: last_state is given, but a call that goes on from a state has its own");
    CHECK(refused(op, {in.queries, in.keys, wide_values}, wide_out.view()) ==
          "recurrent_attention: state has shape (2, 2, 7, 20), but k of shape (2, 2, 10, 7) and v want (2, 2, 7, 21)");
    check_says(refused(op, in, wide_out.view()), {"recurrent_attention: out has shape (2, 4, 10, 21)"});
    check_says(refused(op, {t.queries, in.keys, in.values}, ours.values.view()), {"recurrent_attention: k has shape (2, 2, 10, 7)", "the tokens differ"});
    check_says(error_of([&] { state.append(op, in.keys, wide_values); }), {"recurrent_attention: state has shape (2, 2, 7, 20)"});
    check_says(error_of([&] { state.append(op, in.keys, t.values); }), {"recurrent_attention: v has shape", "the tokens differ"});
    workspace little(64);
    sequential here;
    check_says(error_of([&] { attend(op, in, outputs<float>{out}, state, execution(here, little)); }), {"recurrent_attention", "workspace", "has 64 bytes"});
    t.beta(1, 1, 40, 0) = 3;
    check_says(refused(op, in, out), {"rule.beta of shape (2, 2, 10, 1)", "of batch entry 1 and head 1"});
    t.beta(1, 1, 40, 0) = recurrent_tokens<float>(stated_sizes).beta(1, 1, 40, 0);

    CHECK(state.size() == 37);
    CHECK(same_bits(state.sums(), sums));
    take(state, t, recurrent_rule::gated_delta, {37, 53}, ours.values);
    ours.last = state.sums();
    CHECK(same_bits(ours, whole));
}

// Some heads have taken the tokens, and some have not.
TEST_CASE("recurrent_state: what an executor throws leaves it dead", "[cache][recurrent][portable]") {
    struct throws_late {
        index_t concurrency() const { return 2; }
        void parallel_for(index_t count, function_ref body) const {
            if (count > 0) body(0);
            throw 5;
        }
    } executor;
    const recurrent_tokens<float> t(stated_sizes);
    recurrent_answer<float> ours(stated_sizes);
    recurrent_state<float> state(stated_sizes.state());
    take(state, t, recurrent_rule::delta, {0, 20}, ours.values);
    CHECK_THROWS_AS(take(state, t, recurrent_rule::delta, {20, 5}, ours.values, executor), int);
    const std::string dead = "recurrent_state: state was left by a call that threw: only its death is defined";
    CHECK(error_of([&] { take(state, t, recurrent_rule::delta, {20, 5}, ours.values); }) == dead);
    CHECK(error_of([&] { static_cast<void>(state.fork()); }) == dead);
    CHECK(error_of([&] { static_cast<void>(state.sums()); }) == dead);
    state = recurrent_state<float>(stated_sizes.state());
    take(state, t, recurrent_rule::delta, {0, 20}, ours.values);
    CHECK(state.size() == 20);
}

} // namespace attn::testing
