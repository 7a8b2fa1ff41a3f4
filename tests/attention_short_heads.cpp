// Softmax attention over many short heads, as windows are: a task takes several of them, and keeps what they share.
#include "softmax_checks.hpp"

#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/score/composed_score.hpp>

namespace attn::testing {

namespace {

constexpr index_t entries = 37;

template <Scalar T>
tensor_view<const T> entry_of(const tensor<T>& t, index_t entry) {
    auto s = t.shape();
    s.batch = 1;
    return head_major<const T>(t.data() + (t.shape().batch == 1 ? 0 : entry) * s.size(), s);
}

/// Three kinds of windows: one segment, two, and keys of which some belong to nobody.
std::vector<std::int32_t> window_ids(index_t tokens) {
    std::vector<std::int32_t> ids;
    for (index_t entry = 0; entry < entries; ++entry)
        for (index_t t = 0; t < tokens; ++t) ids.push_back(static_cast<std::int32_t>(entry % 4 == 1 ? t / 20 : entry % 4 == 2 ? t % 3 : 0));
    return ids;
}

} // namespace

TEMPLATE_TEST_CASE("softmax: short heads together are what each is by itself, bit by bit", "[attention][portable]", ATTN_TEST_NUMBERS) {
    constexpr index_t heads = 2, channels = 5;
    thread_pool threads(2);
    sequential here;
    for (const index_t tokens : {1, 49, 64, 70})
        for (const auto& s : {shape{1, heads, tokens, tokens}, {1, 1, 1, tokens}, {entries, heads, tokens, tokens}}) {
            INFO(tokens << " tokens, bias " << to_string(s));
            auto in = random_given<TestType>({entries, heads, heads, tokens, tokens, channels, 16});
            for (index_t e = 0; e < 3 * channels; ++e) in.keys.data()[5 * heads * tokens * channels + e] *= 1000;
            in.keys.data()[in.keys.shape().size() / 2] = std::numeric_limits<TestType>::quiet_NaN();
            const auto bias = hiding_bias<TestType>(s, 7);
            const auto ids = window_ids(tokens);
            const auto all = [&](auto& executor) {
                const softmax_attention op{.score = additive_bias(bias.view()), .pattern = segments(ids, entries)};
                return attend_rows<TestType>(op, in, executor);
            };
            const auto together = all(here);
            CHECK(same_bits(all(threads), together));
            for (index_t entry = 0; entry < entries; ++entry) {
                const auto own = std::span(ids).subspan(static_cast<std::size_t>(entry * tokens), static_cast<std::size_t>(tokens));
                const softmax_attention op{.score = additive_bias<TestType>{entry_of(bias, entry)}, .pattern = segments(own)};
                const inputs<TestType> one{entry_of(in.queries, entry), entry_of(in.keys, entry), entry_of(in.values, entry)};
                const auto alone = attend_rows<TestType>(op, one, here);
                const auto rows = entry_of(together.values, entry);
                CHECK(std::equal(alone.values.data(), alone.values.data() + alone.values.shape().size(), rows.data(),
                                 [](auto a, auto b) { return same_bits(a, b); }));
            }
        }
}

TEMPLATE_TEST_CASE("softmax: short heads with a bias before or after other scores", "[attention]", ATTN_TEST_NUMBERS) {
    const auto in = random_given<TestType>({entries, 4, 2, 49, 49, 5, 9});
    const auto bias = hiding_bias<TestType>({1, 4, 49, 49}, 7);
    const auto ids = window_ids(49);
    const auto check = [&](const auto& op) { check_against_reference(op, in); };
    const additive_bias added(bias.view());
    const segments pattern(ids, entries);
    const std::vector<double> sinks{-1, 0, 1, 2};
    check(softmax_attention<segments, additive_bias<TestType>>{.score = added, .pattern = pattern, .sinks = sinks});
    check(softmax_attention<segments, composed_score<soft_cap, additive_bias<TestType>>>{.score = composed_score{soft_cap{3}, added}, .pattern = pattern});
    check(softmax_attention<segments, composed_score<additive_bias<TestType>, soft_cap>>{.score = composed_score{added, soft_cap{3}}, .pattern = pattern});
}

TEMPLATE_TEST_CASE("softmax: whether heads share a bias changes no bit", "[attention][portable]", ATTN_TEST_NUMBERS) {
    thread_pool threads(2);
    sequential here;
    constexpr index_t heads = 2, channels = 5, tokens = 150, few = 3;
    auto in = random_given<TestType>({few, heads, heads, tokens, tokens, channels, 16});
    for (index_t e = 0; e < 3 * channels; ++e) in.keys.data()[5 * tokens * channels + e] *= 1000;
    in.keys.data()[in.keys.shape().size() / 2] = std::numeric_limits<TestType>::quiet_NaN();
    const auto ids = window_ids(tokens);
    const auto own_ids = std::span(ids).first(few * tokens);
    for (const auto& s : {shape{1, 1, tokens, tokens}, {1, heads, tokens, tokens}, {few, 1, tokens, tokens}}) {
        INFO("bias " << to_string(s));
        const auto shared = hiding_bias<TestType>(s, 7);
        tensor<TestType> repeated({few, heads, tokens, tokens});
        for (index_t entry = 0; entry < few; ++entry)
            for (index_t head = 0; head < heads; ++head)
                std::copy_n(shared.view().row(s.batch == 1 ? 0 : entry, s.heads == 1 ? 0 : head, 0), tokens * tokens,
                            repeated.view().row(entry, head, 0));
        const softmax_attention op{.score = additive_bias(shared.view()), .pattern = segments(own_ids, few)};
        const softmax_attention plain{.score = additive_bias(repeated.view()), .pattern = segments(own_ids, few)};
        const auto exact = attend_rows<TestType>(plain, in);
        CHECK(same_bits(attend_rows<TestType>(op, in, here), exact));
        CHECK(same_bits(attend_rows<TestType>(op, in, threads), exact));
    }
}

// A sum of products that began with its bias would be rounded at the bias's size once for each channel.
TEST_CASE("softmax: a large bias costs no accuracy", "[attention]") {
    for (const index_t keys : {49, 500}) {
        const auto in = random_given<float>({3, 2, 2, 49, keys, 32, 16});
        auto bias = random_tensor<float>({1, 2, 49, keys}, 5);
        for (index_t e = 0; e < bias.shape().size(); ++e) bias.data()[e] *= 10;
        const softmax_attention op{.score = additive_bias(bias.view())};
        const auto ours = attend_rows<float>(op, in);
        const auto exact = exact_rows<float>(op, in);
        auto plain = no_answer<float>(ours.values.shape(), true);
        reference::softmax<float>(in, plain.out(), op.scale, op.score, op.pattern, op.sinks);
        CHECK(largest_error(ours.values, exact.values) <=
              2 * largest_error(plain.values, exact.values) + 4 * epsilon<float> * largest_magnitude(exact.values));
    }
}

} // namespace attn::testing
