#include "demo_caches.hpp"

#include "measure.hpp"

#include "attn/attention/linear_attention.hpp"
#include "attn/cache/attend.hpp"
#include "attn/cache/linear_state.hpp"
#include "attn/pattern/causal.hpp"

#include <cstring>

namespace attn::bench {

namespace {

/// How two results differ, in words.
std::string difference_text(const tensor<float>& a, const tensor<float>& b) {
    const auto size = a.shape().size();
    if (std::memcmp(a.data(), b.data(), static_cast<std::size_t>(size) * sizeof(float)) == 0) return "the same bits";
    float largest = 0;
    for (index_t e = 0; e < size; ++e) largest = std::max(largest, std::abs(a.data()[e] - b.data()[e]));
    char text[32];
    std::snprintf(text, sizeof text, "up to %.1e", static_cast<double>(largest));
    return text;
}

/// A row: append and attend with one word after the other.
std::vector<std::string> row_of(const std::string& name, const auto& op, auto& cache, double bytes, const tensor<float>& x) {
    tensor<float> out(x.shape());
    const execution run;
    const auto seconds = seconds_of([&] {
        for (index_t i = 0; i < x.shape().tokens; ++i) {
            const auto word = x.view().slice({.tokens = {i, 1}});
            cache.append(word, word);
            attend(op, word, cache, outputs<float>{out.view().slice({.tokens = {i, 1}})}, run);
        }
    });
    return {name, time_text(seconds / static_cast<double>(x.shape().tokens)), bytes_text(bytes), difference_text(out, attend(op, x, x, x))};
}

} // namespace

std::vector<std::vector<std::string>> cache_table(const tensor<float>& x) {
    const auto& s = x.shape();
    std::vector<std::vector<std::string>> rows{{"causal, with a cache of", "a word", "memory", "beside one call"}};
    const softmax_attention op{.pattern = causal{}};
    for (const auto& [name, format] : {std::pair("floats", cache_format::full),
                                       {"bfloat16", cache_format::bfloat16},
                                       {"half", cache_format::half},
                                       {"int8", cache_format::int8},
                                       {"int4", cache_format::int4}}) {
        const cache_layout layout{.kv_heads = s.heads, .key_channels = s.channels, .value_channels = s.channels, .format = format};
        const auto pages = (s.tokens + layout.page_tokens - 1) / layout.page_tokens;
        key_value_pool<float> pool(layout, pages);
        sequence<float> words(pool);
        rows.push_back(row_of(name, op, words, static_cast<double>(pool_bytes<float>(layout, pages)), x));
    }
    const linear_attention linear{.pattern = causal{}};
    linear_state<float> state(linear, {.kv_heads = s.heads, .key_channels = s.channels, .value_channels = s.channels});
    const auto of_state = static_cast<double>(s.heads * s.channels * (s.channels + 1) * index_t{sizeof(float)}); // S and z
    rows.push_back(row_of("linear attention's state", linear, state, of_state, x));
    return rows;
}

} // namespace attn::bench
