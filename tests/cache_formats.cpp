// What caches store numbers in: errors of at most half a step, what is exact, and what is refused; and saved sequences.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/cache/attend.hpp>
#include <attn/cache/cache_format.hpp>
#include <attn/cache/sequence.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

TEMPLATE_TEST_CASE("quantise: each number is at most half a step away, and groups of equal floats are exact", "[cache][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto format : {cache_format::int8, cache_format::int4})
        for (const index_t channels : {0, 1, 2, 5, 31, 32, 33, 64, 70, 128}) {
            INFO("channels " << channels << (format == cache_format::int8 ? " int8" : " int4"));
            const auto count = static_cast<std::size_t>(channels);
            CHECK(quantised_bytes(format, channels) ==
                  (count + 31) / 32 * (format == cache_format::int8 ? 4 : 8) + ((format == cache_format::int8 ? count : (count + 1) / 2) + 3) / 4 * 4);
            std::vector<std::byte> bytes(quantised_bytes(format, channels));
            for (const double size : {1e-30, 1.0, 1e30}) {
                auto t = random_tensor<T>({1, 1, 1, channels}, 1, static_cast<T>(size));
                const std::span<const T> numbers(t.data(), count);
                std::vector<T> back(count);
                quantise<T>(format, numbers, bytes);
                dequantise<T>(format, bytes, back);
                for (std::size_t first = 0; first < count; first += 32) {
                    const auto group = numbers.subspan(first, std::min<std::size_t>(32, count - first));
                    const auto [low, high] = std::ranges::minmax(group);
                    const auto a = static_cast<double>(low), b = static_cast<double>(high);
                    const auto step = format == cache_format::int8 ? std::max(std::abs(a), std::abs(b)) / 127 : (b - a) / 15;
                    for (std::size_t c = 0; c < group.size(); ++c)
                        CHECK(std::abs(static_cast<double>(back[first + c]) - static_cast<double>(group[c])) <= step / 2 + 2e-7 * std::max(std::abs(a), std::abs(b)));
                }
                for (const float equal : {0.0f, -1.7f, static_cast<float>(size) * 1.3f}) {
                    const std::vector<T> same(count, static_cast<T>(equal));
                    quantise<T>(format, same, bytes);
                    dequantise<T>(format, bytes, back);
                    CHECK(back == same);
                }
            }
        }
}

TEST_CASE("quantise: of two multiples as near the even one, and what cannot be is refused", "[cache][portable]") {
    std::vector<std::byte> bytes(quantised_bytes(cache_format::int8, 4));
    std::vector<float> back(4);
    quantise<float>(cache_format::int8, std::vector<float>{127, 0.5f, 1.5f, -2.5f}, bytes);
    dequantise<float>(cache_format::int8, bytes, back);
    CHECK(back == std::vector<float>{127, 0, 2, -2});
    bytes.resize(quantised_bytes(cache_format::int4, 4));
    quantise<float>(cache_format::int4, std::vector<float>{-5, 10, -4.5f, -3.5f}, bytes);
    dequantise<float>(cache_format::int4, bytes, back);
    CHECK(back == std::vector<float>{-5, 10, -5, -3});

    constexpr auto infinity = std::numeric_limits<float>::infinity();
    for (const float wrong : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()})
        CHECK(error_of([&] { quantise<float>(cache_format::int4, std::vector<float>{1, wrong, 2, 3}, bytes); }) ==
              "quantise: numbers are not finite, or too large to be quantised");
    CHECK(error_of([&] { quantise<double>(cache_format::int4, std::vector<double>{1, 1e300, 2, 3}, bytes); }) ==
          "quantise: numbers are not finite, or too large to be quantised");
    CHECK(error_of([&] { quantise<float>(cache_format::half, back, bytes); }) == "quantise: format is neither int8 nor int4");
    CHECK(error_of([&] { dequantise<float>(cache_format::int4, std::span(bytes).first(9), back); }) == "dequantise: bytes are 9, but 4 numbers need 12");
    CHECK(error_of([&] { static_cast<void>(quantised_bytes(cache_format::int4, -1)); }) == "quantised_bytes: channels are -1");
}

TEST_CASE("cache: a quantised sequence is what its tokens become one by one, but for the first", "[cache][portable]") {
    const auto keys = random_tensor<float>({1, 1, 150, 40}, 1), values = random_tensor<float>({1, 1, 150, 33}, 2), q = random_tensor<float>({1, 2, 150, 40}, 3);
    for (const auto format : {cache_format::int8, cache_format::int4}) {
        key_value_pool<float> pool({.kv_heads = 1, .key_channels = 40, .value_channels = 33, .format = format, .exact_tokens = 3}, 4);
        sequence<float> ours(pool), other(pool);
        ours.append(keys, values);
        const auto become = [&](const tensor<float>& of) {
            tensor<float> t(of.shape());
            const auto channels = of.shape().channels;
            std::vector<std::byte> bytes(quantised_bytes(format, channels));
            for (index_t i = 0; i < 150; ++i) {
                const std::span<const float> from(of.data() + i * channels, static_cast<std::size_t>(channels));
                const std::span<float> to(t.data() + i * channels, from.size());
                std::ranges::copy(from, to.begin());
                if (i < 3) continue;
                quantise(format, from, bytes);
                dequantise<float>(format, bytes, to);
            }
            return t;
        };
        const softmax_attention op{.pattern = causal{}};
        const auto exact = attend(op, q, become(keys), become(values));
        CHECK(same_bits(attend(op, q, ours), exact));

        auto wrong = random_tensor<float>({1, 1, 2, 40}, 1);
        wrong(0, 0, 1, 39) = std::numeric_limits<float>::infinity();
        CHECK(error_of([&] { other.append(wrong, random_tensor<float>({1, 1, 2, 33}, 1)); }) ==
              "sequence::append: keys have numbers in row 1 of head 0 that are not finite, or too large to be quantised");
        CHECK((other.size() == 0 && pool.free_pages() == 2));
    }
}

TEST_CASE("cache: what is saved is loaded, into pages of any size, and nothing else is", "[cache][portable]") {
    const auto keys = random_tensor<float>({1, 2, 500, 6}, 1), values = random_tensor<float>({1, 2, 500, 5}, 2), q = random_tensor<float>({1, 4, 3, 6}, 3);
    cache_layout layout{.kv_heads = 2, .key_channels = 6, .value_channels = 5, .format = cache_format::int4, .exact_tokens = 7};
    key_value_pool<float> pool(layout, 5);
    layout.page_tokens = 256;
    key_value_pool<float> larger(layout, 2);
    sequence<float> ours(pool);
    ours.append(keys, values);
    ours.evict({100, 160});
    const auto bytes = ours.save();
    const softmax_attention op{.pattern = causal{}};
    const auto loaded = sequence<float>::load(larger, bytes);
    CHECK((loaded.size() == 500 && loaded.pages() == 2 && loaded.evicted().size() == 1));
    CHECK(same_bits(attend(op, q, loaded), attend(op, q, ours)));

    const auto refused = [](key_value_pool<float>& to, std::span<const std::byte> from) {
        const auto free = to.free_pages();
        const auto error = error_of([&] { static_cast<void>(sequence<float>::load(to, from)); });
        CHECK(to.free_pages() == free);
        return error;
    };
    for (std::size_t size = 0; size < bytes.size(); size += size < 200 ? 1 : 97) check_says(refused(pool, std::span(bytes).first(size)), {"sequence::load: bytes end early"});
    check_says(refused(larger, bytes), {"sequence::load", "need 2 pages", "only 0 are free"});
    auto other = bytes;
    other[0] = std::byte{1}; // an earlier version
    check_says(refused(pool, other), {"sequence::load", "no saved sequence"});
    layout.format = cache_format::int8;
    key_value_pool<float> eight(layout, 2);
    check_says(refused(eight, bytes), {"sequence::load", "another type, format or layout", "kv_heads 2", "key_channels 6", "value_channels 5"});
    layout.format = cache_format::int4;
    layout.rotates_keys = true;
    key_value_pool<float> turned(layout, 2);
    check_says(refused(turned, bytes), {"sequence::load", "another type, format or layout", "rotates_keys 0"});
}

} // namespace attn::testing
