// How softmax attention is cut into tasks shows in no bit: threads that share the keys of few queries, query blocks that begin where documents do,
// masks that are made once for several heads.
#include "executors.hpp"
#include "softmax_checks.hpp"

#include <attn/attention/resumable.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/segments.hpp>

#include <atomic>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
bool same_answer(const answer<T>& a, const answer<T>& b) {
    const auto same = [](const tensor<T>& x, const tensor<T>& y) {
        return std::equal(x.data(), x.data() + x.shape().size(), y.data(), [](T left, T right) { return same_bits(left, right); });
    };
    return same(a.values, b.values) && same(a.log_sum_exp, b.log_sum_exp);
}

/// Ids of documents of these lengths, again and again, until there are n tokens.
std::vector<std::int32_t> packed(const std::vector<index_t>& lengths, index_t n) {
    std::vector<std::int32_t> ids;
    for (std::int32_t id = 0; std::ssize(ids) < n; ++id)
        ids.insert(ids.end(), static_cast<std::size_t>(lengths[static_cast<std::size_t>(id) % lengths.size()]), id);
    ids.resize(static_cast<std::size_t>(n));
    return ids;
}

} // namespace

namespace {

/// A window that counts how often it is asked about a box.
struct counted_window {
    std::atomic<index_t>* asked;
    index_t before;

    auto visible(auto i, auto j) const {
        if constexpr (std::same_as<decltype(j), position_range>) ++*asked;
        return local{before, 0}.visible(i, j);
    }
};

} // namespace

TEST_CASE("softmax: what a query block sees is found by bisection, however many keys lie before it", "[attention][parallel]") {
    const std::vector<float> row(4, 0.5f);
    const auto rows = [&](index_t count) { return tensor_view<const float>(row.data(), {1, 2, count, 4}, {0, 0, 0, 1}); };
    std::atomic<index_t> asked = 0;
    thread_pool two(2);
    sequential here;
    const auto check = [&](index_t queries, index_t keys, index_t window, auto& executor, index_t most) {
        CAPTURE(queries, keys, window, executor.concurrency());
        const softmax_attention op{.pattern = counted_window{&asked, window}};
        tensor<float> out({1, 2, queries, 4});
        asked = 0;
        attend(op, inputs<float>{rows(queries), rows(keys), rows(keys), bottom_right(queries, keys)}, outputs<float>{out}, executor);
        CHECK(asked <= most);
        CHECK(out.data()[0] == 0.5f);
    };
    for (const index_t bits : {10, 16, 22}) {
        check(1, index_t{1} << bits, 128, here, 20 * bits); // a decoding step
        check(1, index_t{1} << bits, 128, two, 20 * bits);
    }
    for (const index_t bits : {12, 15}) check(index_t{1} << bits, index_t{1} << bits, 32, here, (index_t{2} << bits) / 16 * 2 * bits); // a question a key block
}

TEMPLATE_TEST_CASE("softmax: threads that share the keys of few queries give the bits of one thread", "[attention][parallel][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const auto check = [](const auto& op, const given<T>& tensors) {
        inputs<T> in = tensors;
        in.positions = bottom_right(tensors.queries.shape().tokens, tensors.keys.shape().tokens);
        const auto one = attend_rows<T>(op, in);
        const auto exact = exact_rows<T>(op, in);
        CHECK(largest_error(one.values, exact.values) <= 64 * epsilon<T> * std::max(1.0, largest_magnitude(exact.values)));
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            CHECK(same_answer(attend_rows<T>(op, in, executor), one));
        });
    };
    for (const index_t queries : {1, 3, 20})
        for (const index_t keys : {1025, 5200}) {
            INFO(queries << " queries, " << keys << " keys");
            auto in = random_given<T>({1, 2, 1, queries, keys, 5, 3});
            const std::array sinks{0.5, -1.0};
            check(softmax_attention{.sinks = sinks}, in);
            check(softmax_attention{.pattern = local{3000, 0}}, in);
            check(softmax_attention{.pattern = local{7, 0} | strided{3}}, in);
            for (index_t c = 0; c < 3; ++c) in.values(0, 0, keys / 2, c) = std::numeric_limits<T>::max(); // sums that are done again
            check(softmax_attention{.pattern = local{keys, 0} & !local{2, 2}}, in);
        }
}

TEST_CASE("softmax: keys that come in runs, in whose midst the calling thread pauses, give the bits of one call", "[attention][parallel]") {
    constexpr index_t keys = 5200;
    const std::array sinks{0.5, -1.0};
    const auto check = [&](const auto& op, index_t queries, const std::vector<index_t>& spans) {
        const auto tensors = random_given<float>({1, 2, 1, queries, keys, 5, 3});
        inputs<float> in = tensors;
        in.positions = bottom_right(queries, keys);
        const auto whole = attend_rows<float>(op, in);
        const auto shapes = shapes_of(in);
        const kernel::visible_keys_of<float, std::remove_cvref_t<decltype(op.pattern)>> visible(op.pattern, shapes, in.positions);
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            using rows_type = detail::resumable<std::remove_cvref_t<decltype(op)>, float>;
            auto resumed = no_answer<float>(op.output_shape(shapes), true);
            workspace memory(rows_type::workspace_bytes(shapes, executor.concurrency(), false));
            const execution run(executor, memory);
            index_t pauses = 0, runs = 0;
            const auto count = [&, caller = std::this_thread::get_id()](index_t) { pauses += std::this_thread::get_id() == caller; };
            const detail::pausing_execution pausing(run, count);
            const auto out = resumed.out();
            rows_type rows(op, visible, in, out, pausing);
            for (index_t pass = 0; pass < std::ssize(spans); ++pass)
                for (index_t first = 0, size = spans[static_cast<std::size_t>(pass)]; first < keys; first += size, ++runs) {
                    const row_range some{first, std::min(size, keys - first)};
                    auto part = in.slice({}, {.tokens = some});
                    part.positions = {in.positions.first_query, first};
                    rows.add_keys(part, pass);
                }
            rows.finish();
            CHECK(same_answer(resumed, whole));
            CHECK(pauses >= (executor.concurrency() == 1 && queries > 1 ? 4 : 1) * runs);
        });
    };
    for (const index_t queries : {1, 300}) {
        check(softmax_attention{.sinks = sinks}, queries, {1024});
        check(softmax_attention{.pattern = local{3000, 0}}, queries, {2048});
        check(softmax_attention{.pattern = local{7, 0} | strided{3}}, queries, {1024, 3072});
    }
    const auto none = random_given<float>({1, 2, 1, 4, 0, 5, 3}); // rows of which no run comes
    auto out = no_answer<float>({1, 2, 4, 3}, true);
    const softmax_attention op{.pattern = causal{}, .sinks = sinks};
    const inputs<float> in = none;
    const kernel::visible_keys_of<float, causal> visible(op.pattern, shapes_of(in), in.positions);
    using rows_type = detail::resumable<std::remove_cvref_t<decltype(op)>, float>;
    workspace memory(rows_type::workspace_bytes(shapes_of(in), 1, false));
    sequential here;
    const execution run(here, memory);
    const auto written = out.out();
    rows_type(op, visible, in, written, run).finish();
    CHECK(out.values(0, 1, 3, 2) == 0);
    CHECK(out.log_sum_exp(0, 1, 3, 0) == -1);
}

TEMPLATE_TEST_CASE("softmax: a packed document has the bits that it has by itself", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr index_t n = 700, heads = 3;
    const auto in = random_given<T>({1, heads, 3, n, n, 9, 6});
    for (const auto& lengths : {std::vector<index_t>{1}, {5}, {37}, {64}, {65}, {1, 100}, {48, 3, 130, 20}, {300, 2, 2}}) {
        INFO("documents of " << lengths.front() << " tokens and others");
        const auto ids = packed(lengths, n);
        const auto check = [&](const auto& op, const auto& alone) {
            check_against_reference<T>(op, in);
            const auto all = attend_rows<T>(op, in);
            index_t different = 0;
            for (index_t first = 0, end; first < n; first = end) {
                end = std::find_if(ids.begin() + first, ids.end(), [&](auto id) { return id != ids[static_cast<std::size_t>(first)]; }) - ids.begin();
                const auto document = [&](const tensor<T>& t) { return t.slice({.tokens = {first, end - first}}); };
                const auto own = attend(alone, document(in.queries), document(in.keys), document(in.values), {.first_query = first, .first_key = first});
                for (index_t h = 0; h < heads; ++h)
                    for (index_t i = first; i < end; ++i)
                        for (index_t c = 0; c < 6; ++c) different += !same_bits(own(0, h, i - first, c), all.values(0, h, i, c));
            }
            CHECK(different == 0);
        };
        check(softmax_attention{.pattern = segments(ids)}, softmax_attention{});
        check(softmax_attention{.pattern = causal{} & segments(ids)}, softmax_attention{.pattern = causal{}});
    }
}

} // namespace attn::testing
