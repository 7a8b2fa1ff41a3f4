// Caches: the pages of sequences, what is refused, and attention to them. The random suite has programs of all their verbs.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "storage.hpp"

#include <attn/attention/pointwise_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/cache/attend.hpp>
#include <attn/cache/key_value_pool.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/draft_tree.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/tiles.hpp>
#include <attn/score/alibi.hpp>

namespace attn::testing {

namespace {

constexpr cache_layout small_cache{.kv_heads = 2, .key_channels = 6, .value_channels = 5};

/// Queries, keys and values of a sequence of so many tokens.
template <Scalar T>
struct cached_tokens {
    tensor<T> queries, keys, values;

    explicit cached_tokens(index_t count, unsigned seed = 1)
        : queries(random_tensor<T>({1, 4, count, 6}, seed)), keys(random_tensor<T>({1, 2, count, 6}, seed + 1)),
          values(random_tensor<T>({1, 2, count, 5}, seed + 2)) {}
    void append_to(sequence<T>& to, index_t first, index_t count) const {
        const tensor_part part{.tokens = {first, count}};
        to.append(keys.slice(part), values.slice(part));
    }
};

/// The last rows of a result.
template <Scalar T>
tensor<T> last_rows_of(const tensor<T>& all, index_t count) {
    return rows_of(all, all.shape().tokens - count, count);
}

/// Attention to a sequence, with any executor and any number of its last queries, has the bits of attention to its tokens as tensors.
template <class Op, Scalar T>
void check_cached_bits(const Op& op, const cached_tokens<T>& all, const sequence<T>& of) {
    const auto exact = attend(op, all.queries, all.keys, all.values);
    for (const index_t count : {index_t{1}, index_t{3}, index_t{130}, of.size()})
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(count << " queries on " << name);
            const auto ours = attend(op, last_rows_of(all.queries, count), of, executor);
            CHECK(same_bits(ours, last_rows_of(exact, count)));
        });
}

} // namespace

TEMPLATE_TEST_CASE("cache: attention to a sequence has the bits of attention to one tensor, however it was appended", "[cache][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const cached_tokens<T> all(901);
    auto layout = small_cache;
    for (const index_t page : {128, 384}) {
        layout.page_tokens = page;
        key_value_pool<T> pool(layout, 8);
        sequence<T> ours(pool);
        for (index_t first = 0, count = 1; first < 901; first += count, count = std::min(2 * count + 1, 901 - first)) all.append_to(ours, first, count);
        const std::vector<double> slopes{0.5, 0.25, 0.125, 0.0625};
        check_cached_bits(softmax_attention{.pattern = causal{}}, all, ours);
        check_cached_bits(softmax_attention{.score = alibi(slopes), .pattern = sliding_window(200) | (causal{} & pattern::global{3})}, all, ours);
        check_cached_bits(softmax_attention{.pattern = causal{} & (pattern::local{5, 0} | pattern::strided{7})}, all, ours);
        check_cached_bits(pointwise_attention{.weight = sigmoid{-2}, .pattern = causal{}}, all, ours);
    }
}

TEST_CASE("cache: 16-bit formats hold what tensors of that type would", "[cache][portable]") {
    const cached_tokens<float> all(300);
    for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
        auto layout = small_cache;
        layout.format = format == narrow_format::half ? cache_format::half : cache_format::bfloat16;
        key_value_pool<float> pool(layout, 3);
        sequence<float> ours(pool);
        all.append_to(ours, 0, 300);
        auto k = stored_tensor(random_tensor<float>(all.keys.shape(), 2), format, layout::head_major);
        auto v = stored_tensor(random_tensor<float>(all.values.shape(), 3), format, layout::head_major);
        const softmax_attention op{.pattern = causal{}};
        const auto exact = attend(op, inputs<float>{all.queries, k.view(), v.view()});
        CHECK(same_bits(attend(op, all.queries, ours), exact));
        CHECK(same_bits(attend(op, last_rows_of(all.queries, 1), ours), last_rows_of(exact, 1)));
    }
}

TEST_CASE("cache: a result goes to a tensor, a view, one of 16 bits, or outputs", "[cache]") {
    const cached_tokens<float> all(150);
    key_value_pool<float> pool(small_cache, 2);
    sequence<float> ours(pool);
    all.append_to(ours, 0, 150);
    const softmax_attention op{.pattern = causal{}};
    const auto q = last_rows_of(all.queries, 3);
    const auto exact = attend(op, q, ours);
    thread_pool threads(2);
    tensor<float> out(exact.shape()), by_token(exact.shape()), whole(exact.shape()), log_sum_exp({1, 4, 3, 1});
    attend(op, q, ours, out);
    const auto view = token_major(by_token.data(), exact.shape());
    attend(op, q, ours, view, threads);
    attend(op, q, ours, {whole, log_sum_exp});
    CHECK((same_bits(out, exact) && same_bits(whole, exact) && log_sum_exp(0, 3, 2, 0) != 0));
    tensor<Eigen::bfloat16> narrow(exact.shape());
    attend(op, q, ours, narrow);
    bool same = true;
    for (index_t h = 0; h < 4; ++h)
        for (index_t i = 0; i < 3; ++i)
            for (index_t c = 0; c < 5; ++c)
                same = same && view(0, h, i, c) == exact(0, h, i, c) && narrow(0, h, i, c) == static_cast<Eigen::bfloat16>(exact(0, h, i, c));
    CHECK(same);
}

TEST_CASE("cache: pages are taken as tokens come, shared by forks, and given back", "[cache]") {
    const cached_tokens<float> all(400), other(400, 7);
    key_value_pool<float> pool(small_cache, 6);
    CHECK(pool.pages() == 6);
    const softmax_attention op{.pattern = causal{}};
    {
        sequence<float> first(pool);
        CHECK(pool.free_pages() == 6);
        all.append_to(first, 0, 129);
        CHECK((first.size() == 129 && first.pages() == 2 && pool.free_pages() == 4));
        auto second = first.fork();
        CHECK((second.size() == 129 && pool.free_pages() == 4));
        other.append_to(second, 129, 10); // the page that both have half of is copied
        CHECK((pool.free_pages() == 3 && first.size() == 129));
        all.append_to(first, 129, 271);
        CHECK(same_bits(attend(op, all.queries, first), attend(op, all.queries, all.keys, all.values)));
        second.truncate(128);
        CHECK((second.pages() == 1 && pool.free_pages() == 2));
        other.append_to(second, 128, 1);
        first = std::move(second);
        CHECK((first.size() == 129 && pool.free_pages() == 4));
    }
    CHECK(pool.free_pages() == 6);
}

TEST_CASE("cache: a window is a ring, beside sinks that stay", "[cache]") {
    const cached_tokens<float> all(5000);
    key_value_pool<float> pool(small_cache, 4);
    sequence<float> ours(pool);
    const auto pattern = sliding_window(100) | (causal{} & pattern::global{4});
    const softmax_attention op{.pattern = pattern};
    const auto exact = attend(op, all.queries, all.keys, all.values);
    for (index_t first = 0; first < 5000; first += 50) {
        all.append_to(ours, first, 50);
        tensor<float> q({1, 4, 1, 6});
        for (index_t h = 0; h < 4; ++h) std::copy_n(&all.queries(0, h, first + 49, 0), 6, &q(0, h, 0, 0));
        const auto row = attend(op, q, ours);
        for (index_t h = 0; h < 4; ++h)
            for (index_t c = 0; c < 5; ++c) REQUIRE(same_bits(row(0, h, 0, c), exact(0, h, first + 49, c)));
        ours.release(pattern);
        REQUIRE(ours.pages() <= 3);
    }
    CHECK((ours.evicted().size() == 1 && ours.evicted()[0].first == 128)); // the page of the sinks is there
}

TEST_CASE("cache: what is evicted is seen no more, wherever it lay", "[cache][portable]") {
    const cached_tokens<float> all(700);
    key_value_pool<float> pool(small_cache, 6);
    sequence<float> ours(pool);
    all.append_to(ours, 0, 700);
    ours.evict({100, 200});
    ours.evict({650, 7});
    ours.evict({300, 1});
    CHECK((ours.evicted().size() == 2 && ours.evicted()[0] == row_range{100, 201} && ours.evicted()[1] == row_range{650, 7}));
    CHECK(pool.free_pages() == 1);
    auto keys = all.keys.view();
    const auto left = pattern::predicate{[](const auto& i, const auto& j) { return j <= i && (j < 100 || j > 300) && (j < 650 || j > 656); }};
    const auto exact = attend(softmax_attention{.pattern = left}, all.queries, keys, all.values);
    CHECK(same_bits(attend(softmax_attention{.pattern = causal{}}, all.queries, ours), exact));
    ours.truncate(653);
    CHECK(ours.evicted()[1] == row_range{650, 3});
    ours.evict({0, 653});
    CHECK(ours.pages() == 1); // its last, which is not full
    const auto nothing = attend(softmax_attention{.pattern = causal{}}, last_rows_of(all.queries, 2), ours);
    CHECK(std::all_of(nothing.data(), nothing.data() + nothing.shape().size(), [](float x) { return x == 0; }));
    all.append_to(ours, 653, 47);
    CHECK(ours.size() == 700);
}

TEST_CASE("cache: a batch of sequences has the bits of a call for each", "[cache][portable]") {
    const cached_tokens<float> all(900);
    key_value_pool<float> pool(small_cache, 20);
    std::vector<sequence<float>> sequences;
    std::vector<const sequence<float>*> of;
    const std::vector<index_t> sizes{1, 300, 0, 900, 129}, starts{0, 1, 3, 3, 203, 204};
    for (const auto size : sizes) all.append_to(sequences.emplace_back(pool), 0, size);
    for (const auto& s : sequences) of.push_back(&s);
    const softmax_attention op{.pattern = causal{}};
    const auto q = random_tensor<float>({1, 4, 204, 6}, 9);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        auto ours = no_answer<float>({1, 4, 204, 5}, true);
        attend(op, q, sequence_batch<float>{of, starts}, ours.out(), executor);
        for (std::size_t e = 0; e < of.size(); ++e) {
            const tensor_part rows{.tokens = {starts[e], starts[e + 1] - starts[e]}};
            auto alone = no_answer<float>({1, 4, rows.tokens.count, 5}, true);
            attend(op, q.slice(rows), *of[e], alone.out());
            detail::for_each_number(alone.values.shape(), [&](index_t, index_t h, index_t i, index_t c) {
                REQUIRE(same_bits(alone.values(0, h, i, c), ours.values(0, h, starts[e] + i, c)));
            });
        }
    });
}

TEST_CASE("cache: drafts of a tree see their ancestors, and the accepted path is kept", "[cache][portable]") {
    const cached_tokens<float> all(140);
    key_value_pool<float> pool(small_cache, 6);
    sequence<float> ours(pool);
    all.append_to(ours, 0, 140); // 130 settled tokens, and 10 drafts, across the end of a page
    const std::vector<index_t> parents{-1, -1, 0, 0, 2, 1, 4, -1, 5, 6};
    const auto is_ancestor = [&](index_t t, index_t j) {
        for (; t >= 0; t = parents[static_cast<std::size_t>(t)])
            if (t == j) return true;
        return false;
    };
    const pattern::tiles mask([&](index_t i, index_t j) { return i < 130 || j < 130 ? j <= i : is_ancestor(i - 130, j - 130); }, 140, 140);
    const softmax_attention op{.pattern = pattern::draft_tree(parents, 130)};
    const auto exact = attend(softmax_attention{.pattern = mask}, all.queries, all.keys, all.values);
    CHECK(same_bits(attend(op, all.queries, all.keys, all.values), exact));
    CHECK(same_bits(attend(op, last_rows_of(all.queries, 10), ours), last_rows_of(exact, 10)));

    const auto other = ours.fork();
    const std::vector<index_t> path{0, 2, 4, 6, 9};
    ours.keep(130, path);
    CHECK((ours.size() == 135 && other.size() == 140 && pool.free_pages() == 3));
    sequence<float> expected(pool);
    all.append_to(expected, 0, 130);
    for (const auto t : path) all.append_to(expected, 130 + t, 1);
    const auto q = random_tensor<float>({1, 4, 7, 6}, 8);
    CHECK(same_bits(attend(softmax_attention{.pattern = causal{}}, q, ours), attend(softmax_attention{.pattern = causal{}}, q, expected)));
    CHECK(same_bits(attend(op, last_rows_of(all.queries, 10), other), last_rows_of(exact, 10)));

    const auto said = [](const auto& call) { return error_of(call); };
    check_says(said([&] { ours.keep(136, path); }), {"sequence::keep", "first", "136", "135 tokens"});
    check_says(said([&] { ours.keep(131, path); }), {"sequence::keep", "numbers", "hold 4 behind 2", "4 tokens"});
    check_says(said([&] { ours.keep(100, std::vector<index_t>{3, 3}); }), {"sequence::keep", "numbers", "hold 3 behind 3"});
    check_says(said([&] { pattern::draft_tree(std::vector<index_t>{-1, 1}, 5); }), {"draft_tree", "parents", "draft 1 follows 1"});
    check_says(said([&] { static_cast<void>(attend(op, all.queries, all.keys, all.values, positions{.first_query = 1, .first_key = 0})); }),
               {"softmax_attention", "draft_tree{10, 130}", "140"});
    ours.evict({100, 3});
    check_says(said([&] { ours.keep(99, std::vector<index_t>{}); }), {"sequence::keep", "evicted", "102"});
    CHECK(ours.size() == 135);
}

TEST_CASE("cache: what is wrong is refused by name, and changes nothing", "[cache]") {
    const auto said = [](const auto& call) { return error_of(call); };
    auto layout = small_cache;
    layout.page_tokens = 100;
    check_says(said([&] { key_value_pool<float> pool(layout, 1); }), {"pool_bytes", "page_tokens", "100"});
    layout = small_cache;
    layout.format = cache_format::half;
    check_says(said([&] { key_value_pool<double> pool(layout, 1); }), {"pool_bytes", "format", "16 bits"});
    check_says(said([&] { key_value_pool<float> pool(small_cache, -1); }), {"pool_bytes", "pages", "-1"});
    check_says(said([&] { key_value_pool<float> pool(small_cache, index_t{1} << 50); }), {"pool_bytes", "pages"});

    const cached_tokens<float> all(400);
    key_value_pool<float> pool(small_cache, 3);
    sequence<float> ours(pool);
    all.append_to(ours, 0, 130);
    const auto unchanged = [&] { return ours.size() == 130 && ours.pages() == 2 && pool.free_pages() == 1; };
    check_says(said([&] { all.append_to(ours, 0, 400); }), {"sequence::append", "keys", "(1, 2, 400, 6)", "3 pages", "only 1 are free"});
    check_says(said([&] { ours.append(all.queries, all.values); }), {"sequence::append", "keys", "(1, 4, 400, 6)", "(1, 2, 400, 6)"});
    check_says(said([&] { ours.append(all.keys, all.keys); }), {"sequence::append", "values", "(1, 2, 400, 6)"});
    check_says(said([&] { ours.append(all.keys, last_rows_of(all.values, 3)); }), {"sequence::append", "values", "(1, 2, 3, 5)", "(1, 2, 400, 6)"});
    check_says(said([&] { ours.truncate(131); }), {"sequence::truncate", "131", "130"});
    check_says(said([&] { ours.evict({129, 2}); }), {"sequence::evict", "129 .. 130", "130"});
    const std::vector<std::int32_t> ids(200);
    check_says(said([&] { ours.release(segments(ids)); }), {"sequence::release", "segments"});
    check_says(said([&] { ours.release(pattern::local{-1, 0}); }), {"sequence::release", "local"});
    CHECK(unchanged());

    const softmax_attention op{.pattern = causal{}};
    check_says(said([&] { static_cast<void>(attend(op, all.queries, ours)); }), {"softmax_attention", "q", "(1, 4, 400, 6)", "130 tokens"});
    check_says(said([&] { static_cast<void>(attend(op, random_tensor<float>({1, 3, 1, 6}, 1), ours)); }), {"softmax_attention", "k", "heads"});
    check_says(said([&] { static_cast<void>(attend(op, random_tensor<float>({1, 4, 1, 7}, 1), ours)); }), {"softmax_attention", "k", "channels"});
    check_says(said([&] { static_cast<void>(attend(op, random_tensor<float>({2, 4, 1, 6}, 1), ours)); }), {"softmax_attention", "q", "one batch entry"});
    tensor<float> out({1, 4, 1, 6});
    check_says(said([&] { attend(op, last_rows_of(all.queries, 1), ours, {out}); }), {"softmax_attention", "out", "(1, 4, 1, 6)", "(1, 4, 1, 5)"});
    const std::vector<const sequence<float>*> two{&ours, nullptr};
    check_says(said([&] { attend(op, last_rows_of(all.queries, 2), sequence_batch<float>{two}, {out}); }), {"softmax_attention", "sequences", "null"});
    check_says(said([&] { attend(op, last_rows_of(all.queries, 3), sequence_batch<float>{two}, {out}); }), {"softmax_attention", "sequences", "2", "3"});
    CHECK(unchanged());
}

TEST_CASE("cache: a pool in the caller's memory has the pages that fit, and a step allocates nothing but for a page's place", "[cache]") {
    const auto bytes = pool_bytes<float>(small_cache, 2);
    CHECK(bytes == 2 * 128 * 2 * 11 * sizeof(float));
    std::vector<std::byte> memory(bytes + alignment);
    key_value_pool<float> pool(small_cache, memory);
    CHECK(pool.pages() == 2);
}

} // namespace attn::testing
