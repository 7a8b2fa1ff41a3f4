// Caches that turn keys by rotary positions when they are read: the bits of tensors that were turned before, and what is refused.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"

#include <attn/attention/pointwise_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/cache/attend.hpp>
#include <attn/cache/select_tokens.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/score/alibi.hpp>

namespace attn::testing {

namespace {

/// The keys of a mask.
struct left_over {
    const std::vector<bool>* kept;

    bool visible(const auto&, index_t j) const { return (*kept)[static_cast<std::size_t>(j)]; }
    visibility visible(const position_range&, const position_range&) const { return {false, false}; }
};

/// A tensor as a cache stores it, but for the first tokens.
template <Scalar T>
tensor<T> as_stored(cache_format format, const tensor<T>& t, index_t exact) {
    tensor<T> all(t.shape());
    const auto narrow = detail::row_format_of(format, t.shape().channels).narrow;
    const bool quantises = format == cache_format::int8 || format == cache_format::int4;
    std::vector<std::byte> bytes(quantises ? quantised_bytes(format, t.shape().channels) : sizeof(T));
    detail::for_each_row(t.shape(), [&](index_t b, index_t h, index_t i) {
        const std::span<const T> from(t.view().row(b, h, i), static_cast<std::size_t>(t.shape().channels));
        const std::span<T> to(all.view().row(b, h, i), from.size());
        std::ranges::copy(from, to.begin());
        if (quantises && i >= exact) {
            quantise<T>(format, from, bytes);
            dequantise<T>(format, bytes, to);
        } else if (!quantises) {
            for (auto& x : to) {
                detail::stored<T>(x, bytes.data(), narrow);
                x = detail::loaded<T>(bytes.data(), narrow);
            }
        }
    });
    return all;
}

/// A sequence whose keys are turned when they are read, and its tokens as tensors.
template <Scalar T>
struct rotated_tokens {
    const rotary<T>& turns;
    key_value_pool<T> pool;
    tensor<T> queries, keys, values;
    sequence<T> ours{pool};
    std::vector<bool> kept = {};

    rotated_tokens(const rotary<T>& by, const cache_layout& l, bool skips_evicted, index_t count)
        : turns(by), pool(l, 12, {.table = by, .skips_evicted = skips_evicted}),
          queries(random_tensor<T>({1, 2 * l.kv_heads, count, l.key_channels}, 1)), keys(random_tensor<T>({1, l.kv_heads, count, l.key_channels}, 2)),
          values(random_tensor<T>({1, l.kv_heads, count, l.value_channels}, 3)) {}

    void append(index_t count) {
        const tensor_part part{.tokens = {ours.size(), count}};
        ours.append(keys.slice(part), values.slice(part));
        kept.resize(kept.size() + static_cast<std::size_t>(count), true);
    }
    void evict(const row_range& positions) {
        ours.evict(positions);
        std::fill_n(kept.begin() + positions.first, positions.count, false);
    }
    /// Where its tokens stand, one by one.
    tensor<index_t> places() const {
        tensor<index_t> all({.tokens = ours.size(), .channels = 1});
        for (index_t j = 0, left = 0; j < ours.size(); left += kept[static_cast<std::size_t>(j)], ++j)
            all(0, 0, j, 0) = pool.reading().skips_evicted ? left : j;
        return all;
    }
    /// The keys that score highest for its last queries are those of tensors that were turned; and attention to them has the same bits.
    void check_selected(index_t wanted, std::initializer_list<index_t> counts) const {
        const auto& l = pool.layout();
        const auto size = ours.size();
        const auto where = places();
        const auto k = rotate(turns, as_stored(l.format, rows_of(keys, 0, size), l.exact_tokens), where), q = rotate(turns, rows_of(queries, 0, size), where);
        const auto v = as_stored(l.format, rows_of(values, 0, size), l.exact_tokens), weights = random_tensor<T>({1, q.shape().heads, size, 1}, 4);
        const token_selection exact_rule{.count = wanted, .pattern = causal{} & left_over{&kept}};
        for (const auto count : counts) {
            const index_t first = size - count;
            const auto last_q = rows_of(q, first, count), last_weights = rows_of(weights, first, count), given_q = rows_of(queries, first, count);
            const auto exact = select_tokens(last_q, k, last_weights, exact_rule, {.first_query = first, .first_key = 0});
            for_each_executor([&](auto& executor, const std::string& name) {
                INFO(count << " queries on " << name);
                const auto table = select_tokens(given_q, ours, last_weights, {.count = wanted}, executor);
                CHECK((table.shape() == exact.shape() && std::equal(table.data(), table.data() + table.shape().size(), exact.data())));
            });
            const auto expected = attend(softmax_attention{.pattern = causal{} & pattern::selected(exact, 1, 1, first)}, inputs<T>{last_q, k, v, {.first_query = first, .first_key = 0}});
            CHECK(same_bits(attend(softmax_attention{.pattern = causal{} & pattern::selected(exact, 1, 1, first)}, given_q, ours), expected));
        }
    }
    /// Attention of its last queries, on executors, has the bits of attention to tensors that were turned.
    template <class Op>
    void check_bits(const Op& op, std::initializer_list<index_t> counts) const {
        const auto& l = pool.layout();
        const auto size = ours.size();
        const auto where = places();
        const auto k = rotate(turns, as_stored(l.format, rows_of(keys, 0, size), l.exact_tokens), where);
        const auto v = as_stored(l.format, rows_of(values, 0, size), l.exact_tokens);
        const auto q = rotate(turns, rows_of(queries, 0, size), where);
        auto all = op.pattern & left_over{&kept};
        auto exact_op = [&] {
            if constexpr (requires { op.weight; }) return pointwise_attention{.weight = op.weight, .pattern = all};
            else return softmax_attention{.score = op.score, .pattern = all};
        }();
        const auto exact = attend(exact_op, q, k, v);
        for (const auto count : counts) {
            const auto last = rows_of(queries, size - count, count), expected = rows_of(exact, size - count, count);
            const auto check = [&](auto& executor, const std::string& name) {
                INFO(count << " queries on " << name);
                CHECK(same_bits(attend(op, last, ours, executor), expected));
            };
            if (count < 100) {
                for_each_executor(check);
            } else { // of many, which take long, a thread has some whichever executor it is
                sequential one;
                thread_pool threads(3);
                check(one, "sequential");
                check(threads, "thread_pool of 3");
            }
        }
    }
};

} // namespace

TEMPLATE_TEST_CASE("cache: keys that are turned when they are read have the bits of keys that were turned before", "[cache][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<double> slopes{0.5, 0.25, 0.125, 0.0625};
    for (const auto format : {cache_format::full, cache_format::bfloat16, cache_format::half, cache_format::int8, cache_format::int4}) {
        if (!std::same_as<T, float> && (format == cache_format::bfloat16 || format == cache_format::half)) continue;
        for (const bool skips : {false, true}) {
            INFO("format " << static_cast<int>(format) << (skips ? ", evicted tokens skipped" : ""));
            const auto pairs = skips ? rotary_pairs::interleaved : rotary_pairs::half_split;
            const rotary<T> turns(700, skips ? 6 : 34, pairs);
            rotated_tokens<T> all(turns,
                                  {.kv_heads = 2, .key_channels = skips ? 7 : 40, .value_channels = 5, .page_tokens = 256, .format = format, .exact_tokens = 37},
                                  skips, 700);
            for (const index_t count : {1, 2, 30, 267, 400}) {
                all.append(count);
                if (count == 267) all.evict({250, 10}); // across the end of a page
            }
            all.check_bits(softmax_attention{.pattern = causal{}}, {1, 9, 130});
            all.evict({5, 20});
            all.evict({256, 256}); // the second page is gone
            all.evict({698, 2});
            all.check_bits(softmax_attention{.pattern = causal{}}, {1, 3, 700});
            all.check_selected(50, {1, 70});
            all.check_bits(softmax_attention{.score = alibi(slopes), .pattern = sliding_window(200) | (causal{} & pattern::global{3})}, {2, 300});
            all.check_bits(softmax_attention{.pattern = causal{} & pattern::strided{7}}, {1, 100});
            all.check_bits(pointwise_attention{.weight = sigmoid{-2}, .pattern = causal{}}, {2, 40});
            all.evict({0, 250}); // and the first
            all.check_bits(softmax_attention{.pattern = causal{}}, {1, 300});
            all.check_selected(500, {2}); // more than are left
        }
    }
}

TEST_CASE("cache: of a window with sinks, positions inside the cache are no more than it has tokens", "[cache][portable]") {
    constexpr index_t sinks = 4, window = 60;
    const rotary<float> turns(sinks + window, 8);
    rotated_tokens<float> all(turns, {.kv_heads = 1, .key_channels = 8, .value_channels = 3}, true, 1000);
    all.append(sinks + window);
    const softmax_attention op{.pattern = causal{}};
    all.check_bits(op, {1, sinks + window});
    while (all.ours.size() < 1000) {
        all.evict({all.ours.size() - window, 1});
        all.append(1);
        if (all.ours.size() % 97 == 0) all.check_bits(op, {1, 5});
    }
    CHECK((all.ours.evicted().size() == 1 && all.ours.evicted()[0] == row_range{sinks, 1000 - sinks - window}));
}

TEST_CASE("cache: behind a document that is gone, a prompt is what it would be without it", "[cache][portable]") {
    const rotary<float> turns(400, 8);
    rotated_tokens<float> all(turns, {.kv_heads = 1, .key_channels = 8, .value_channels = 3}, true, 400);
    all.append(400);
    auto fork = all.ours.fork();
    fork.evict({0, 256});
    sequence<float> alone(all.pool);
    const tensor_part prompt{.tokens = {256, 144}};
    alone.append(all.keys.slice(prompt), all.values.slice(prompt));
    const auto q = random_tensor<float>({1, 2, 7, 8}, 5);
    const softmax_attention op{.pattern = causal{}};
    CHECK(same_bits(attend(op, q, fork), attend(op, q, alone)));
    CHECK_FALSE(same_bits(attend(op, q, all.ours), attend(op, q, alone)));
    const auto loaded = sequence<float>::load(all.pool, fork.save());
    CHECK(same_bits(attend(op, q, loaded), attend(op, q, alone)));

    const std::vector<const sequence<float>*> both{&all.ours, &fork};
    const std::vector<index_t> starts{0, 3, 7};
    tensor<float> out({1, 2, 7, 3});
    attend(op, q, sequence_batch<float>{both, starts}, {out});
    CHECK(same_bits(rows_of(out, 0, 3), attend(op, rows_of(q, 0, 3), all.ours)));
    CHECK(same_bits(rows_of(out, 3, 4), attend(op, rows_of(q, 3, 4), fork)));
}

TEST_CASE("cache: keys that cannot be turned are refused", "[cache]") {
    const auto said = [](const auto& call) { return error_of(call); };
    const rotary<float> turns(100, 8);
    const cache_layout layout{.kv_heads = 1, .key_channels = 8, .value_channels = 3};
    auto wrong = layout;
    wrong.key_channels = 7;
    check_says(said([&] { key_value_pool<float> pool(wrong, 1, {.table = turns}); }), {"key_value_pool", "reading", "8 channels", "keys have 7"});
    wrong = layout;
    wrong.rotates_keys = true;
    check_says(said([&] { key_value_pool<float> pool(wrong, 1, {.table = turns}); }), {"key_value_pool", "reading", "rotates_keys", "Hadamard"});

    const softmax_attention op{.pattern = causal{}};
    const auto k = random_tensor<float>({1, 1, 101, 8}, 1), v = random_tensor<float>({1, 1, 101, 3}, 2), q = random_tensor<float>({1, 2, 1, 8}, 3), weight = random_tensor<float>({1, 2, 1, 1}, 4);
    for (const bool skips : {false, true}) {
        key_value_pool<float> pool(layout, 2, {.table = turns, .skips_evicted = skips});
        sequence<float> tokens(pool);
        tokens.append(k, v);
        auto out = no_answer<float>({1, 2, 1, 3}, false);
        const auto attends = [&] { attend(op, q, tokens, out.out()); };
        check_says(said(attends), {"softmax_attention", "q", "(1, 2, 1, 8)", "position 100", "0 to 99"});
        CHECK(same_bits(out.values, no_answer<float>({1, 2, 1, 3}, false).values));
        tokens.evict({50, 1});
        const auto selects = [&] { static_cast<void>(select_tokens(q, tokens, weight)); };
        if (!skips) check_says(said(selects), {"select_tokens", "q", "position 100", "0 to 99"});
        if (skips) attends(); // the last is at 99
        else check_says(said(attends), {"softmax_attention", "q", "position 100", "0 to 99"});
        tokens.truncate(100);
        attends();
        selects();
        const auto many = random_tensor<float>({1, 2, 101, 8}, 3), two = random_tensor<float>({2, 2, 1, 8}, 3);
        check_says(said([&] { static_cast<void>(select_tokens(many, tokens, weight)); }), {"select_tokens", "q has shape (1, 2, 101, 8)", "has 100 tokens"});
        check_says(said([&] { static_cast<void>(select_tokens(two, tokens, weight)); }), {"select_tokens", "q has shape (2, 2, 1, 8)", "one batch entry"});
        check_says(said([&] { static_cast<void>(select_tokens(q, tokens, q)); }), {"select_tokens", "weights have shape (1, 2, 1, 8)"});
    }
}

} // namespace attn::testing
