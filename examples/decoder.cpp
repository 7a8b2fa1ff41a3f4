// A decoder: grouped heads, causal, with ALiBi. A prompt in one call, then token by token beside a cache of keys and values.
// decoder [float | bfloat16 | half | int8 | int4]: what the cache is stored in.
#include <attn/cache/attend.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/score/alibi.hpp>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string_view>

namespace {

constexpr attn::index_t heads = 8, kv_heads = 2, channels = 32, prompt = 20, max_tokens = 200;

} // namespace

int main(int count, char** arguments) {
    using attn::cache_format;
    const std::map<std::string_view, cache_format> formats{{"float", cache_format::full},
                                                           {"bfloat16", cache_format::bfloat16},
                                                           {"half", cache_format::half},
                                                           {"int8", cache_format::int8},
                                                           {"int4", cache_format::int4}};
    const auto format = formats.find(count > 1 ? arguments[1] : "float");
    if (format == formats.end()) {
        std::fprintf(stderr, "usage: decoder [float | bfloat16 | half | int8 | int4]\n");
        return 1;
    }
    const auto q = attn::tensor<float>::random({.heads = heads, .tokens = max_tokens, .channels = channels}, 1);
    const auto keys = attn::tensor<float>::random({.heads = kv_heads, .tokens = max_tokens, .channels = channels}, 2);
    const auto values = attn::tensor<float>::random({.heads = kv_heads, .tokens = max_tokens, .channels = channels}, 3);

    const auto slopes = attn::alibi_slopes(heads); // the operator refers to them
    const auto op = attn::softmax_attention{.score = attn::alibi{slopes}, .pattern = attn::causal{}};
    std::printf("slopes:");
    for (const auto slope : slopes) std::printf(" %g", slope);

    // Four query heads share a head of keys and values, so the cache is a quarter of the size. Its pages are taken as tokens come.
    attn::key_value_pool<float> pool(
        {.kv_heads = kv_heads, .key_channels = channels, .value_channels = channels, .format = format->second}, 4);
    attn::sequence<float> all(pool), tokens(pool);

    // The whole sequence at once, to compare with.
    all.append(keys, values);
    const auto whole = attn::attend(op, q, all);

    // The prompt at once, then one token at a time: its query is that of the sequence's last token.
    bool same = true;
    for (attn::index_t first = 0; first < max_tokens;) {
        const attn::tensor_part next{.tokens = {first, first == 0 ? prompt : 1}}; // nothing is copied
        tokens.append(keys.slice(next), values.slice(next));
        const auto out = attn::attend(op, q.slice(next), tokens);
        for (attn::index_t h = 0; h < heads; ++h)
            for (attn::index_t i = 0; i < next.tokens.count; ++i)
                same = same && std::equal(&out(0, h, i, 0), &out(0, h, i, 0) + channels, &whole(0, h, first + i, 0));
        first = next.tokens.end();
    }
    std::printf("\n%td tokens of prompt, %td more one by one: %s\n", prompt, max_tokens - prompt,
                same ? "the same bits as all at once" : "DIFFERENT from all at once");
    return 0;
}
