#include "demo_caches.hpp"

#include "measure.hpp"

#include "attn/attention/linear_attention.hpp"
#include "attn/cache/attend.hpp"
#include "attn/cache/linear_state.hpp"
#include "attn/cache/recurrent_state.hpp"
#include "attn/pattern/causal.hpp"

#include <bit>

namespace attn::bench {

namespace {

/// How two results differ, in words.
std::string difference_text(const tensor<float>& a, const tensor<float>& b) {
    const auto size = a.shape().size();
    const auto same = [](float x, float y) { return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y); };
    if (std::equal(a.data(), a.data() + size, b.data(), same)) return "the same bits";
    float largest = 0;
    for (index_t e = 0; e < size; ++e) largest = std::max(largest, std::abs(a.data()[e] - b.data()[e]));
    char text[32];
    std::snprintf(text, sizeof text, "up to %.1e", static_cast<double>(largest));
    return text;
}

/// A row: one word after the other, whose attention attend_to(where it is, its row, out, execution) finds.
std::vector<std::string> row_of(const std::string& name, const auto& op, double bytes, const tensor<float>& x, const auto& attend_to) {
    tensor<float> out(x.shape());
    const execution run;
    const auto seconds = seconds_of([&] {
        for (index_t i = 0; i < x.shape().tokens; ++i) {
            const tensor_part word{.tokens = {i, 1}};
            attend_to(word, x.slice(word), outputs<float>{out.slice(word)}, run);
        }
    });
    return {name, time_text(seconds / static_cast<double>(x.shape().tokens)), bytes_text(bytes), difference_text(out, attend(op, x, x, x))};
}
/// Of what is appended to, and then attended to.
std::vector<std::string> row_of(const std::string& name, const auto& op, auto& cache, double bytes, const tensor<float>& x) {
    return row_of(name, op, bytes, x, [&](const tensor_part&, const tensor_view<const float>& word, const outputs<float>& out, const execution& run) {
        cache.append(word, word);
        attend(op, word, cache, out, run);
    });
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
    const auto decays = retention_log_decays<float>(s.heads, s.tokens);
    const auto retention = [](const tensor_view<const float>& of) { return recurrent_attention{.rule = rule::gated{of}}; };
    recurrent_state<float> retained({1, s.heads, s.channels, s.channels});
    rows.push_back(row_of("retention's state", retention(decays), of_state, x,
                          [&](const tensor_part& word, const tensor_view<const float>& row, const outputs<float>& out, const execution& run) {
                              attend(retention(decays.slice(word)), inputs<float>{row, row, row}, out, retained, run);
                          }));
    return rows;
}

} // namespace attn::bench
