// Recurrent attention over ranks has the bits of the call on one machine, and its last state.
#include "catch.hpp"
#include "errors.hpp"
#include "rank_checks.hpp"
#include "sequence_checks.hpp"

#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
struct token_terms {
    tensor<T> log_decay, beta, a, b;

    token_terms(index_t batch, index_t heads, index_t tokens, index_t channels, index_t of_decays)
        : log_decay(random_tensor<T>({batch, heads, tokens, of_decays}, 5)), beta(random_tensor<T>({batch, 1, tokens, 1}, 6)),
          a(random_tensor<T>({batch, heads, tokens, channels}, 7)), b(random_tensor<T>({batch, heads, tokens, channels}, 8)) {
        for (auto* t : {&log_decay, &beta}) std::transform(t->data(), t->data() + t->shape().size(), t->data(), [](T x) { return std::abs(x); });
        std::transform(log_decay.data(), log_decay.data() + log_decay.shape().size(), log_decay.data(), [](T x) { return -x; });
        for (auto* t : {&a, &b, &beta}) std::transform(t->data(), t->data() + t->shape().size(), t->data(), [](T x) { return x / 4; });
    }
};

/// rule(rows) is the rule of some of the tokens.
template <Scalar T>
void check_ranks(const inputs<T>& in, const auto& rule, const std::vector<index_t>& some_ranks) {
    const auto s = shapes_of(in);
    const shape of_state{s.keys.batch, s.keys.heads, s.keys.channels, s.values.channels};
    const auto first = random_tensor<T>(of_state, 9);
    tensor<T> last(of_state), over(of_state);
    auto whole = recurrent_attention{.rule = rule(row_range{0, s.keys.tokens}), .first_state = first};
    whole.last_state = last;
    const auto expected = attend(whole, in);
    for (const auto& parts : partitions(causal{}, in, some_ranks)) {
        if (parts.query_cuts().cuts != parts.key_cuts().cuts) continue;
        CAPTURE(s.keys.tokens, parts.ranks());
        std::fill_n(over.data(), over.shape().size(), T{0});
        CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
            const auto rows = parts.keys(ranks.rank());
            const tensor_part part{.tokens = rows};
            auto op = recurrent_attention{.rule = rule(rows), .first_state = first};
            if (rows.end() == s.keys.tokens && (rows.count > 0 || (s.keys.tokens == 0 && ranks.rank() == ranks.size() - 1))) op.last_state = over;
            thread_pool two(1 + ranks.rank() % 2);
            const auto out = attend(sequence_parallel{op, parts}, ranks, in.slice(part, part), two);
            for (index_t b = 0; b < s.queries.batch; ++b)
                for (index_t h = 0; h < s.queries.heads; ++h)
                    for (index_t i = 0; i < rows.count; ++i)
                        for (index_t c = 0; c < s.values.channels; ++c)
                            require(same_bits(out(b, h, i, c), expected(b, h, rows.first + i, c)), "the rows have the bits of the whole call's");
        }));
        CHECK(std::equal(last.data(), last.data() + last.shape().size(), over.data()));
    }
}

} // namespace

TEMPLATE_TEST_CASE("ranks: recurrent attention, cut anywhere", "[distributed]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t n : {0, 1, 37, 333}) {
        for (const index_t of_decays : {1, 9}) {
            const auto in = random_given<T>({2, 4, 2, n, n, 9, 17});
            const token_terms<T> t(2, 2, n, 9, of_decays);
            const std::vector<index_t> ranks{1, 2, 3, 5, 7};
            const auto some = [](const tensor<T>& x, const row_range& rows) { return tokens_of<T>(x, rows); };
            check_ranks(inputs<T>(in), [&](const row_range&) { return rule::linear<T>{}; }, ranks);
            check_ranks(inputs<T>(in), [&](const row_range& r) { return rule::gated<T>{some(t.log_decay, r)}; }, ranks);
            check_ranks(inputs<T>(in), [&](const row_range& r) { return rule::gated_delta<T>{some(t.log_decay, r), some(t.beta, r)}; }, ranks);
            check_ranks(inputs<T>(in), [&](const row_range& r) { return rule::general<T>{some(t.log_decay, r), some(t.a, r), some(t.b, r)}; }, ranks);
        }
    }
}

TEST_CASE("ranks: recurrent attention refuses cuts that differ between ranks", "[distributed]") {
    const auto in = random_given<float>({1, 1, 1, 50, 50, 8, 8});
    const auto s = shapes_of(inputs<float>(in));
    const std::vector<index_t> cuts{0, 20, 50, 50}, others{0, 20, 40, 50};
    const partition parts(causal{}, s, cuts, cuts), other(causal{}, s, others, others);
    std::vector<std::string> errors(3, nothing_thrown);
    on_thread_ranks(3, [&](auto& ranks) {
        const auto& own = ranks.rank() == 0 ? parts : other;
        const tensor_part part{.tokens = own.keys(ranks.rank())};
        errors[static_cast<std::size_t>(ranks.rank())] =
            error_of([&] { static_cast<void>(attend(sequence_parallel{recurrent_attention{}, own}, ranks, inputs<float>(in).slice(part, part))); });
    });
    for (const auto& error : errors) check_says(error, {"sequence_parallel: ranks 0 and 1 differ in their cuts"});
}

TEST_CASE("ranks: recurrent attention wants one cut for queries and keys, and none waits for ever", "[distributed]") {
    const auto in = random_given<float>({1, 2, 2, 50, 50, 8, 8});
    const auto s = shapes_of(inputs<float>(in));
    const partition uneven(causal{}, s, {0, 20, 50}, {0, 30, 50});
    on_thread_ranks(2, [&](auto& ranks) {
        const tensor_part q{.tokens = uneven.queries(ranks.rank())}, k{.tokens = uneven.keys(ranks.rank())};
        CHECK_THROWS_WITH(attend(sequence_parallel{recurrent_attention{}, uneven}, ranks, inputs<float>(in).slice(q, k)),
                          Contains("cuts queries and keys at different tokens") || Contains("has failed"));
    });
    const partition parts(causal{}, s, 3);
    check_failures("sequence_parallel", 3, [&](auto& ranks, auto& executor) {
        const tensor_part part{.tokens = parts.keys(ranks.rank())};
        static_cast<void>(attend(sequence_parallel{recurrent_attention{}, parts}, ranks, inputs<float>(in).slice(part, part), executor));
    });
}

} // namespace attn::testing
