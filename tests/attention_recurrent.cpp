// Recurrent attention: every rule against its definition, decays of any size, sequences in pieces, and what is refused.
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layouts.hpp"
#include "recurrent_checks.hpp"

namespace attn::testing {

namespace {

constexpr auto endless = std::numeric_limits<double>::infinity();

/// Sizes at the edges of registers and of chunks, which have 16 tokens; shared heads, and terms that are shared.
const std::vector<recurrent_sizes> some_sizes{{1, 1, 1, 1, 1, 1},
                                              {1, 1, 1, 100, 64, 64},
                                              {.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 37, .key_dim = 16, .value_dim = 24, .one_batch = true},
                                              {.heads = 3, .kv_heads = 1, .tokens = 19, .key_dim = 7, .value_dim = 5},
                                              {.heads = 2, .kv_heads = 2, .tokens = 16, .key_dim = 33, .value_dim = 128, .one_head = true},
                                              {.heads = 8, .kv_heads = 1, .tokens = 1, .key_dim = 64, .value_dim = 64},
                                              {.batch = 2, .heads = 2, .kv_heads = 2, .tokens = 17, .key_dim = 2, .value_dim = 3, .one_batch = true, .one_head = true},
                                              {.batch = 3, .heads = 6, .kv_heads = 2, .tokens = 33, .key_dim = 20, .value_dim = 1},
                                              {.tokens = 48, .key_dim = 130, .value_dim = 17},
                                              {.heads = 2, .kv_heads = 1, .tokens = 15, .key_dim = 3, .value_dim = 0}};

/// Numbers of units, so a sum of some hundred terms.
template <Scalar T>
void check_near(const tensor<T>& ours, const tensor<double>& exact) {
    CHECK(largest_error(ours, exact) <= 100 * epsilon<T> * std::max(1.0, largest_magnitude(exact)));
}

} // namespace

TEMPLATE_TEST_CASE("recurrent_attention: every rule is its definition", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    for_each_rule(some_sizes, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<TestType> tokens(s);
        for (const bool from_first : {false, true}) {
            const auto ours = attend(tokens, kind, from_first);
            const auto exact = reference_of(tokens, kind, from_first);
            check_near(ours.values, exact.values);
            check_near(ours.last, exact.last);
        }
    });
}

// Of what decays to nothing nothing is left, and of what follows all; whatever lies between.
TEMPLATE_TEST_CASE("recurrent_attention: log decays of any size", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<std::vector<double>> mixtures{{-1e4}, {-endless}, {0.0}, {0, 0, 0, -1e4, -0.5, 0, -endless, -1e-9, -50, -80, -3, 0, 0}};
    for_each_rule({{.batch = 2, .heads = 2, .kv_heads = 1, .tokens = 53, .key_dim = 20, .value_dim = 19}}, [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        recurrent_tokens<T> tokens(s);
        for (const auto& logs : mixtures) {
            INFO(logs.size() << " log decays from " << logs[0]);
            for (index_t e = 0; e < tokens.log_decay.shape().size(); ++e)
                tokens.log_decay.data()[e] = static_cast<T>(logs[static_cast<std::size_t>(e * 7 / 3) % logs.size()]);
            const auto ours = attend(tokens, kind, true);
            const auto exact = reference_of(tokens, kind, true);
            check_near(ours.values, exact.values);
            check_near(ours.last, exact.last);
            if (logs[0] == 0 || kind == recurrent_rule::linear || kind == recurrent_rule::delta || kind == recurrent_rule::general) continue;
            // The state is that of the last token, by itself.
            index_t wrong = 0;
            detail::for_each_number(s.state(), [&](index_t b, index_t h, index_t c, index_t n) {
                auto value = tokens.values(b, h, s.tokens - 1, n);
                if (kind == recurrent_rule::gated_delta) value *= tokens.beta(b, h, s.tokens - 1, 0);
                wrong += ours.last(b, h, c, n) != tokens.keys(b, h, s.tokens - 1, c) * value;
            });
            CHECK(wrong == 0);
        }
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: pieces of a sequence have the bits of the whole", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 150, .key_dim = 20, .value_dim = 33}}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const auto whole = attend(tokens, kind, true);
        recurrent_answer<T> pieces(s);
        tensor<T> state(s.state()); // goes on where it lies
        std::copy_n(tokens.first_state.data(), state.shape().size(), state.data());
        for (index_t first = 0, count = 16; first < s.tokens; first += count, count = first % 48 + 16) {
            count = std::min(count, s.tokens - first);
            tokens.with_rule(kind, {first, count}, [&](auto op) {
                op.first_state = state;
                op.last_state = state;
                attn::attend(op, tokens.in({first, count}), outputs<T>{pieces.values.slice({.tokens = {first, count}})});
            });
        }
        CHECK(same_bits(pieces.values, whole.values));
        CHECK(same_bits(state, whole.last));
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: no tokens, and no queries", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 37, .key_dim = 5, .value_dim = 9}}, [](recurrent_rule kind, recurrent_sizes s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        // No queries: the state all the same.
        const auto whole = attend(tokens, kind, true);
        const tensor<T> none({s.batch, 0, s.tokens, s.key_dim});
        tensor<T> no_result({s.batch, 0, s.tokens, s.value_dim}), last(s.state());
        tokens.with_rule(kind, {}, [&](auto op) {
            op.first_state = tokens.first_state;
            op.last_state = last;
            attn::attend(op, inputs<T>{none, tokens.keys, tokens.values}, outputs<T>{no_result});
        });
        CHECK(same_bits(last, whole.last));
        // No tokens: the state that it began with, or zero.
        s.tokens = 0;
        const recurrent_tokens<T> empty(s);
        CHECK(same_bits(attend(empty, kind, true).last, empty.first_state));
        CHECK(same_bits(attend(empty, kind, false).last, tensor<T>(s.state())));
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: a row depends on tokens up to its own", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto not_a_number = std::numeric_limits<T>::quiet_NaN();
    constexpr index_t token = 21, spoiled_head = 1;
    for_each_rule({{.heads = 4, .kv_heads = 2, .tokens = 40, .key_dim = 6, .value_dim = 5}}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const auto expected = attend(recurrent_tokens<T>(s), kind, true);
        const auto check = [&](const char* what, const auto& spoil, bool is_read) {
            INFO(what);
            recurrent_tokens<T> tokens(s);
            spoil(tokens);
            const auto ours = attend(tokens, kind, true);
            index_t wrong = 0;
            detail::for_each_number(ours.values.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
                const bool reached = is_read && i >= token && h / 2 == spoiled_head;
                wrong += reached ? !std::isnan(ours.values(b, h, i, c)) : !same_bits(ours.values(b, h, i, c), expected.values(b, h, i, c));
            });
            detail::for_each_number(ours.last.shape(), [&](index_t b, index_t h, index_t c, index_t n) {
                if (!is_read || h != spoiled_head) wrong += !same_bits(ours.last(b, h, c, n), expected.last(b, h, c, n));
            });
            CHECK(wrong == 0);
        };
        using enum recurrent_rule;
        const auto fill = [&](tensor<T>& t, index_t first_token, index_t channels) {
            for (index_t i = first_token; i < (channels == 1 ? token + 1 : s.tokens); ++i)
                for (index_t c = 0; c < std::min(channels, t.shape().channels); ++c) t(0, spoiled_head, i, c) = not_a_number;
        };
        check("keys and values from a token on", [&](auto& t) { fill(t.keys, token, 100), fill(t.values, token, 100); }, true);
        check("a log decay", [&](auto& t) { fill(t.log_decay, token, 1); }, kind == gated || kind == gated_delta || kind == general);
        check("a beta", [&](auto& t) { fill(t.beta, token, 1); }, kind == delta || kind == gated_delta);
        check("a", [&](auto& t) { fill(t.a, token, 1); }, kind == general);
        check("b", [&](auto& t) { fill(t.b, token, 1); }, kind == general);
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: layouts of all that is read and written do not change a bit", "[recurrent][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 37, .key_dim = 17, .value_dim = 20}}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const auto expected = attend(tokens, kind, true);
        for (const auto [where, name] : all_layouts) {
            INFO(name);
            placed<T> q(tokens.queries, where), k(tokens.keys, where), v(tokens.values, where), g(tokens.log_decay, where), beta(tokens.beta, where), a(tokens.a, where),
                b(tokens.b, where), first(tokens.first_state, where), out(expected.values.shape(), where), last(s.state(), where);
            tokens.with_rule(kind, {}, [&](auto op) {
                if constexpr (requires { op.rule.log_decay; }) op.rule.log_decay = g.view();
                if constexpr (requires { op.rule.beta; }) op.rule.beta = beta.view();
                if constexpr (requires { op.rule.a; }) op.rule.a = a.view(), op.rule.b = b.view();
                op.first_state = first.view();
                op.last_state = last.view();
                attn::attend(op, inputs<T>{q.view(), k.view(), v.view()}, outputs<T>{out.view()});
            });
            CHECK(same_bits(out.copy(), expected.values));
            CHECK(same_bits(last.copy(), expected.last));
            CHECK((out.guards_intact() && last.guards_intact() && first.guards_intact() && q.guards_intact() && g.guards_intact()));
        }
    });
}

TEMPLATE_TEST_CASE("recurrent_attention: executors do not change a bit", "[recurrent][portable][parallel]", ATTN_TEST_NUMBERS) {
    for_each_rule({{.batch = 2, .heads = 6, .kv_heads = 3, .tokens = 70, .key_dim = 17, .value_dim = 20}}, [](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<TestType> tokens(s);
        const auto expected = attend(tokens, kind, true);
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            CHECK(same_bits(attend(tokens, kind, true, executor), expected));
        });
    });
}

TEST_CASE("recurrent_attention: what does not fit is refused", "[recurrent][portable]") {
    const recurrent_sizes s{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 9, .key_dim = 5, .value_dim = 6};
    recurrent_tokens<float> t(s);
    tensor<float> out({2, 4, 9, 6}), last(s.state());
    const auto refusal = [&](const auto& op, const inputs<float>& in, const tensor_view<float>& to) {
        return error_of([&] { attend(op, in, outputs<float>{to}); });
    };
    const auto says = [&](const auto& rule, const std::string& text) {
        CHECK(refusal(recurrent_attention{.rule = rule}, t.in(), out.view()) == (text.empty() ? nothing_thrown : "recurrent_attention: " + text));
    };
    const rule::gated_delta<float> delta{t.log_decay, t.beta};
    const rule::general<float> general{t.log_decay, t.a, t.b};
    says(delta, "");
    says(general, "");

    // Numbers.
    t.log_decay(1, 0, 7, 0) = 1e-9F;
    says(delta, "rule.log_decay of shape (2, 2, 9, 1) has a number, of batch entry 1 and head 0, that is not 0 or less");
    t.log_decay(1, 0, 7, 0) = -0.0F;
    t.beta(0, 1, 8, 0) = 2.0001F;
    says(delta, "rule.beta of shape (2, 2, 9, 1) has a number, of batch entry 0 and head 1, that is not in 0 .. 2");
    t.beta(0, 1, 8, 0) = -1e-9F;
    says(rule::delta<float>{t.beta}, "rule.beta of shape (2, 2, 9, 1) has a number, of batch entry 0 and head 1, that is not in 0 .. 2");
    t.beta(0, 1, 8, 0) = 2;
    says(delta, "");

    // Shapes of what is of tokens.
    const tensor<float> three({3, 2, 9, 1}), heads({2, 4, 9, 1}), tokens({2, 2, 8, 1}), channels({2, 2, 9, 5}), wide({2, 2, 9, 6});
    const std::string one_or_all = "(batch or 1, kv_heads or 1, n, 1 or d_k) is needed";
    const auto log_decay = [&](const tensor<float>& g, const char* shape) {
        says(rule::gated<float>{g}, std::string("rule.log_decay has shape ") + shape + ", but k has (2, 2, 9, 5): " + one_or_all);
    };
    log_decay(three, "(3, 2, 9, 1)");
    log_decay(heads, "(2, 4, 9, 1)");
    log_decay(tokens, "(2, 2, 8, 1)");
    log_decay(wide, "(2, 2, 9, 6)");
    says(rule::gated<float>{channels}, "");
    says(rule::delta<float>{channels}, "rule.beta has shape (2, 2, 9, 5), but k has (2, 2, 9, 5): (batch or 1, kv_heads or 1, n, 1) is needed");
    says(rule::general<float>{t.log_decay, t.beta, t.b},
         "rule.a has shape (2, 2, 9, 1), but k has (2, 2, 9, 5): (batch or 1, kv_heads or 1, n, d_k) is needed");
    says(rule::general<float>{t.log_decay, t.a, wide},
         "rule.b has shape (2, 2, 9, 6), but k has (2, 2, 9, 5): (batch or 1, kv_heads or 1, n, d_k) is needed");
    check_says(refusal(recurrent_attention{.rule = rule::gated<float>{}}, t.in(), out.view()), {"recurrent_attention: rule.log_decay has shape"});

    // Tokens and their positions.
    const tensor<float> more({2, 4, 10, 5}), other({2, 4, 10, 6});
    tensor<float> more_out({2, 4, 10, 6});
    CHECK(refusal(recurrent_attention{.rule = delta}, {more, t.keys, t.values}, more_out.view()) ==
          "recurrent_attention: k has shape (2, 2, 9, 5), but q has (2, 4, 10, 5): the tokens differ");
    auto in = t.in();
    in.positions = {.first_query = 3, .first_key = 3};
    CHECK(refusal(recurrent_attention{.rule = delta}, in, out.view()) == nothing_thrown);
    in.positions.first_key = 2;
    CHECK(refusal(recurrent_attention{.rule = delta}, in, out.view()) ==
          "recurrent_attention: positions of queries begin at 3, but of keys at 2: they are of the same tokens");
    check_says(refusal(recurrent_attention{.rule = delta, .scale = std::nan("")}, t.in(), out.view()), {"recurrent_attention: scale "});

    // States.
    tensor<float> other_state({2, 2, 6, 5});
    const recurrent_attention from_other{.rule = delta, .first_state = other_state}, to_other{.rule = delta, .last_state = other_state};
    CHECK(refusal(from_other, t.in(), out.view()) == "recurrent_attention: first_state has shape (2, 2, 6, 5), but (2, 2, 5, 6) is needed");
    CHECK(refusal(to_other, t.in(), out.view()) == "recurrent_attention: last_state has shape (2, 2, 6, 5), but (2, 2, 5, 6) is needed");
    CHECK(refusal(recurrent_attention{.rule = delta, .first_state = head_major<const float>(nullptr, s.state())}, t.in(), out.view()) ==
          "recurrent_attention: first_state has shape (2, 2, 5, 6) but no memory (a null pointer)");
    const tensor_view<float> repeated(last.data(), s.state(), {0, 30, 6, 1});
    CHECK(refusal(recurrent_attention{.rule = delta, .last_state = repeated}, t.in(), out.view()) ==
          "recurrent_attention: last_state of shape (2, 2, 5, 6) has strides by which its elements overlap");

    // Memory that is read and written.
    tensor<float> shared({1, 1, 1, 2000});
    const auto view = [&](index_t from, const shape& of) { return tensor_view<float>(shared.data() + from, of, {of.heads * of.tokens * of.channels, of.tokens * of.channels, of.channels, 1}); };
    const auto state = view(0, s.state()), shifted = view(3, s.state());
    CHECK(refusal(recurrent_attention{.rule = delta, .first_state = state, .last_state = state}, t.in(), out.view()) == nothing_thrown);
    std::fill_n(shared.data(), shared.shape().size(), 0.0F);
    CHECK(refusal(recurrent_attention{.rule = delta, .first_state = state, .last_state = shifted}, t.in(), out.view()) ==
          "recurrent_attention: last_state of shape (2, 2, 5, 6) overlaps first_state of shape (2, 2, 5, 6)");
    CHECK(refusal(recurrent_attention{.rule = rule::delta<float>{view(100, {2, 2, 9, 1})}, .last_state = state}, t.in(), out.view()) ==
          "recurrent_attention: last_state of shape (2, 2, 5, 6) overlaps rule.beta of shape (2, 2, 9, 1)");
    CHECK(refusal(recurrent_attention{.rule = delta, .last_state = state}, {t.queries, view(100, t.keys.shape()), t.values}, out.view()) ==
          "recurrent_attention: last_state of shape (2, 2, 5, 6) overlaps k of shape (2, 2, 9, 5)");
    const auto to = view(0, out.shape());
    for (const auto& [op, name] : {std::pair{recurrent_attention{.rule = delta, .first_state = state}, "first_state"}, {recurrent_attention{.rule = delta, .last_state = state}, "last_state"}})
        CHECK(refusal(op, t.in(), to) == std::string("recurrent_attention: out of shape (2, 4, 9, 6) overlaps ") + name + " of shape (2, 2, 5, 6)");
    CHECK(refusal(recurrent_attention{.rule = rule::gated<float>{view(100, {2, 2, 9, 1})}}, t.in(), to) ==
          "recurrent_attention: out of shape (2, 4, 9, 6) overlaps rule.log_decay of shape (2, 2, 9, 1)");
}

} // namespace attn::testing
