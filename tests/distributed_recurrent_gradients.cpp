// The gradient of recurrent attention over ranks has the bits of that of one machine, wherever the sequence is cut.
#include "catch.hpp"
#include "errors.hpp"
#include "rank_checks.hpp"
#include "recurrent_gradient_checks.hpp"

#include <attn/distributed/backward.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
partition cut_at(const recurrent_tokens<T>& t, const std::vector<index_t>& cuts) {
    return {pattern::causal{}, shapes_of(t.in()), cuts, cuts};
}
/// What a rank's call is given of the gradients of a whole one: its own rows, and of the states those that it is asked for.
template <Scalar T>
recurrent_gradients<T> own_part(recurrent_gradients<T> all, const row_range& rows) {
    for (auto* each : {&all.queries, &all.keys, &all.values, &all.log_decay, &all.beta, &all.a, &all.b}) *each = each->slice({.tokens = rows});
    return all;
}
/// A rank's call. All ranks have the first state, of which the first takes it.
template <Scalar T>
void backward_on(auto& ranks, const partition& parts, const recurrent_tokens<T>& t, recurrent_rule kind, const given_to_recurrent<T>& given, const recurrent_gradients<T>& wanted,
                 const detail::call_execution& run = {}) {
    const auto rows = parts.keys(ranks.rank());
    const auto values = given.values.slice({.tokens = rows});
    t.with_rule(kind, {rows.first, rows.count}, [&](auto op) {
        op.first_state = t.first_state;
        backward(sequence_parallel{op, parts}, ranks, t.in({rows.first, rows.count}), saved_outputs<T>{values}, output_gradients<T>{values}, wanted, run);
    });
}
/// All ranks are given the gradient of the last state, of which the last takes it, and memory that is no larger than needed.
template <Scalar T>
recurrent_gradient_answer<T> gradients_over(const partition& parts, const recurrent_tokens<T>& t, recurrent_rule kind, const given_to_recurrent<T>& given, index_t threads) {
    recurrent_gradient_answer<T> found(t, kind);
    auto wanted = found.wanted();
    wanted.d_last_state = given.last;
    CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
        const auto rows = parts.keys(ranks.rank());
        auto own = own_part(wanted, rows);
        tensor<T> untouched(t.size.state());
        if (rows.first > 0) own.first_state = untouched;
        thread_pool pool(threads + ranks.rank() % 2);
        workspace memory(t.with_rule(kind, {rows.first, rows.count}, [&](const auto& op) { return backward_workspace_bytes<T>(sequence_parallel{op, parts}, ranks.rank(), pool); }));
        fill(memory, std::byte{0xff});
        backward_on(ranks, parts, t, kind, given, own, execution(pool, memory));
        if (rows.first > 0) require(largest_magnitude(reference::widen(untouched.view())) == 0, "the gradient of the first state is the first rank's");
    }));
    return found;
}

} // namespace

TEMPLATE_TEST_CASE("ranks: the gradient of recurrent attention, cut anywhere, has the bits of one machine", "[distributed]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<std::vector<index_t>> cuts_of_70{{0, 70}, {0, 32, 70}, {0, 20, 70}, {0, 16, 48, 70}, {0, 1, 2, 3, 35, 70}, {0, 0, 33, 33, 47, 50, 60, 70}, {0, 65, 68, 69, 70}};
    for_each_rule({{.batch = 2, .heads = 4, .kv_heads = 2, .tokens = 70, .key_dim = 9, .value_dim = 17, .one_batch = true}, {.tokens = 70, .key_dim = 16, .value_dim = 8, .one_head = true}},
                  [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
        INFO(described);
        const recurrent_tokens<T> tokens(s);
        const given_to_recurrent<T> given(s);
        const auto whole = recurrent_gradients_by_kernel(tokens, kind, given, true);
        for (const auto& cuts : cuts_of_70) {
            CAPTURE(cuts);
            CHECK(same_bits(gradients_over(cut_at(tokens, cuts), tokens, kind, given, 1), whole));
        }
        CHECK(same_bits(gradients_over(partition(pattern::causal{}, shapes_of(tokens.in()), 5), tokens, kind, given, 2), whole));
    });
}

TEMPLATE_TEST_CASE("ranks: the gradient of recurrent attention, of few tokens and none, of segments and empty values", "[distributed]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto check = [](const recurrent_sizes& size, const std::vector<std::vector<index_t>>& all_cuts) {
        for_each_rule({size}, [&](recurrent_rule kind, const recurrent_sizes& s, const std::string& described) {
            INFO(described);
            const recurrent_tokens<T> tokens(s);
            const given_to_recurrent<T> given(s);
            const auto whole = recurrent_gradients_by_kernel(tokens, kind, given, true);
            for (const auto& cuts : all_cuts) {
                CAPTURE(cuts);
                CHECK(same_bits(gradients_over(cut_at(tokens, cuts), tokens, kind, given, 2), whole));
            }
        });
    };
    check({.heads = 2, .kv_heads = 1, .tokens = 0, .key_dim = 3, .value_dim = 4}, {{0, 0}, {0, 0, 0, 0}});
    check({.heads = 2, .kv_heads = 2, .tokens = 1, .key_dim = 3, .value_dim = 4}, {{0, 0, 1}, {0, 1, 1}, {0, 0, 1, 1}});
    check({.batch = 2, .heads = 2, .kv_heads = 1, .tokens = 21, .key_dim = 3, .value_dim = 0, .one_batch = true}, {{0, 7, 21}, {0, 19, 20, 21}});
    check({.batch = 0, .heads = 2, .kv_heads = 1, .tokens = 21, .key_dim = 3, .value_dim = 2, .one_batch = true}, {{0, 7, 21}});
    check({.tokens = 2'100, .key_dim = 3, .value_dim = 2}, {{0, 1'040, 2'100}, {0, 5, 1'035, 2'090, 2'100}});
}

TEST_CASE("ranks: each rank gets the gradients of recurrent attention that it wants", "[distributed]") {
    using T = float;
    const recurrent_sizes s{.batch = 2, .heads = 2, .kv_heads = 2, .tokens = 40, .key_dim = 5, .value_dim = 6, .one_batch = true};
    for (const auto kind : {recurrent_rule::gated_delta, recurrent_rule::general}) {
        const recurrent_tokens<T> tokens(s);
        const given_to_recurrent<T> given(s);
        const auto whole = recurrent_gradients_by_kernel(tokens, kind, given, true);
        const auto parts = cut_at(tokens, {0, 10, 13, 40});
        recurrent_gradient_answer<T> found(tokens, kind);
        CHECK_NOTHROW(on_thread_ranks(3, [&](auto& ranks) {
            const auto rank = static_cast<std::size_t>(ranks.rank());
            auto all = found.wanted();
            recurrent_gradients<T> own;
            if (rank == 0) own.first_state = all.first_state, own.log_decay = all.log_decay;
            if (rank == 1) own.queries = all.queries, own.a = all.a, own.beta = all.beta;
            if (rank == 2) own.keys = all.keys, own.log_decay = all.log_decay, own.d_last_state = given.last;
            backward_on(ranks, parts, tokens, kind, given, own_part(own, parts.keys(ranks.rank())));
        }));
        const index_t rows_of[8][2] = {{10, 13}, {13, 40}, {0, 0}, {0, 40}, {10, 13}, {10, 13}, {0, 0}, {0, 5}};
        for (std::size_t n = 0; n < 8; ++n) {
            CAPTURE(n);
            detail::for_each_number(found.all[n].shape(), [&](index_t b, index_t h, index_t i, index_t c) {
                const bool is_wanted = i >= rows_of[n][0] && i < rows_of[n][1] && !(n == 3 && i >= 10 && i < 13);
                require(same_bits(found.all[n](b, h, i, c), is_wanted ? whole.all[n](b, h, i, c) : guard<T>), "what is wanted is there, and nothing else is written");
            });
        }
    }
}

TEST_CASE("ranks: a gradient of recurrent attention that fails on one rank fails on all", "[distributed]") {
    const recurrent_sizes s{.batch = 2, .heads = 3, .kv_heads = 3, .tokens = 50, .key_dim = 5, .value_dim = 6};
    const recurrent_tokens<float> tokens(s);
    const given_to_recurrent<float> given(s);
    for (const auto& cuts : std::vector<std::vector<index_t>>{{0, 16, 32, 50}, {0, 20, 35, 50}}) {
        const auto parts = cut_at(tokens, cuts);
        check_failures("sequence_parallel", 3, [&](auto& ranks, auto& executor) {
            recurrent_gradient_answer<float> found(tokens, recurrent_rule::gated);
            backward_on(ranks, parts, tokens, recurrent_rule::gated, given, own_part(found.wanted(), parts.keys(ranks.rank())), executor);
        });
    }
}

TEST_CASE("ranks: what is refused of a gradient of recurrent attention is refused on all", "[distributed][errors]") {
    const recurrent_sizes s{.heads = 2, .kv_heads = 2, .tokens = 60, .key_dim = 4, .value_dim = 3};
    const recurrent_tokens<float> tokens(s);
    const given_to_recurrent<float> given(s);
    const auto parts = cut_at(tokens, {0, 20, 40, 60}), others = cut_at(tokens, {0, 20, 39, 60});
    const auto heard = [&](const auto& call) {
        std::vector<std::string> errors(3, nothing_thrown);
        on_thread_ranks(3, [&](auto& ranks) {
            recurrent_gradient_answer<float> found(tokens, recurrent_rule::gated);
            errors[static_cast<std::size_t>(ranks.rank())] = error_of<std::exception>([&] { call(ranks, own_part(found.wanted(), parts.keys(ranks.rank()))); });
            require(std::ranges::all_of(found.all, [](const auto& all) { return std::all_of(all.data(), all.data() + all.shape().size(), [](float x) { return same_bits(x, guard<float>); }); }),
                    "nothing is written");
        });
        return errors;
    };
    const auto kind = recurrent_rule::gated;
    const auto refused = [&](const auto& change) {
        return heard([&](auto& ranks, auto wanted) {
            if (ranks.rank() == 1) change(wanted);
            backward_on(ranks, parts, tokens, kind, given, wanted);
        });
    };
    tensor<float> wrong({1, 2, 5, 1}), of_term({1, 2, 20, 1});
    const auto check = [](const std::vector<std::string>& errors, std::string_view says) {
        CHECK(errors[1] == says);
        for (const auto rank : {std::size_t{0}, std::size_t{2}}) CHECK(errors[rank] == "sequence_parallel: rank 1 has failed: " + std::string(says));
    };
    check(refused([&](auto& w) { w.log_decay = wrong; }), "recurrent_attention: wanted.log_decay has shape (1, 2, 5, 1), but (1, 2, 20, 1) is needed");
    check(refused([&](auto& w) { w.beta = of_term; }), "recurrent_attention: wanted.beta is asked for, but the operator has none");
    check(refused([&](auto& w) { w.first_state = wrong; }), "recurrent_attention: wanted.first_state has shape (1, 2, 5, 1), but (1, 2, 4, 3) is needed");
    check(refused([&](auto& w) { w.d_last_state = wrong; }), "recurrent_attention: wanted.d_last_state has shape (1, 2, 5, 1), but (1, 2, 4, 3) is needed");
    check(refused([&](auto& w) { w.queries = wrong; }), "recurrent_attention: wanted.queries has shape (1, 2, 5, 1), but (1, 2, 20, 4) is needed");

    for (const auto& error : heard([&](auto& ranks, auto wanted) {
             if (ranks.rank() == 0) wanted = own_part(wanted, {0, 20}); // both cuts give rank 0 the same tokens
             if (ranks.rank() > 0) backward_on(ranks, parts, tokens, kind, given, wanted);
             else backward_on(ranks, others, tokens, kind, given, wanted);
         }))
        check_says(error, {"sequence_parallel: ranks 0 and 1 differ in their cuts"});
    for (const auto& error : heard([&](auto& ranks, const auto& wanted) {
             auto own = wanted;
             if (ranks.rank() == 2) own.log_decay = {};
             backward_on(ranks, parts, tokens, ranks.rank() == 2 ? recurrent_rule::delta : kind, given, own);
         }))
        check_says(error, {"sequence_parallel: ranks 0 and 2 differ in "});
    for (const auto& error : heard([&](auto& ranks, const auto& wanted) {
             workspace none;
             sequential one;
             backward_on(ranks, parts, tokens, kind, given, wanted, execution(one, none));
         }))
        check_says(error, {"workspace has 0 bytes, but the gradient for q of shape "});
}

} // namespace attn::testing
