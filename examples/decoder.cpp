// A decoder: grouped heads, causal, with ALiBi. A prompt in one call, then token by token beside a cache of keys and values.
// decoder [float | bfloat16 | half]: what the cache is stored in.
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/score/alibi.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string_view>

namespace {

constexpr attn::index_t heads = 8, kv_heads = 2, channels = 32, prompt = 20, max_tokens = 32;

template <class S>
attn::tensor<S> random_tensor(const attn::shape& shape, std::uint32_t seed) {
    attn::tensor<S> x(shape);
    std::mt19937 random(seed);
    std::generate_n(x.data(), shape.size(), [&] { return static_cast<S>(static_cast<float>(random()) / 0x1p31f - 1); });
    return x;
}

/// With a cache of numbers that are stored in S; the queries and the result are float.
template <class S>
int decode() {
    // Room for the longest sequence. Four query heads share a head of keys and values, so the cache is a quarter of the size.
    const auto q = random_tensor<float>({.heads = heads, .tokens = max_tokens, .channels = channels}, 1);
    const auto keys = random_tensor<S>({.heads = kv_heads, .tokens = max_tokens, .channels = channels}, 2);
    const auto values = random_tensor<S>({.heads = kv_heads, .tokens = max_tokens, .channels = channels}, 3);

    const auto slopes = attn::alibi_slopes(heads); // the operator refers to them
    const auto op = attn::softmax_attention{.score = attn::alibi{slopes}, .pattern = attn::causal{}};
    std::printf("slopes:");
    for (const auto slope : slopes) std::printf(" %g", slope);

    // The whole sequence at once, to compare with.
    const auto whole = attn::attend(op, q, keys, values);

    // The prompt at once, then one query at a time. bottom_right says where a query stands: beside the last key.
    float largest = 0;
    const auto compare = [&](const attn::tensor<float>& out, attn::index_t first) {
        for (attn::index_t h = 0; h < heads; ++h)
            for (attn::index_t i = 0; i < out.shape().tokens; ++i)
                for (attn::index_t c = 0; c < channels; ++c)
                    largest = std::max(largest, std::abs(out(0, h, i, c) - whole(0, h, first + i, c)));
    };
    const auto first = [](const auto& x, attn::index_t count) { return x.view().slice({.tokens = {0, count}}); }; // nothing is copied
    compare(attn::attend(op, first(q, prompt), first(keys, prompt), first(values, prompt)), 0);
    for (attn::index_t at = prompt; at < max_tokens; ++at) {
        const auto cached = at + 1; // its own key among them
        compare(attn::attend(op, q.view().slice({.tokens = {at, 1}}), first(keys, cached), first(values, cached),
                             attn::bottom_right(1, cached)),
                at);
    }
    std::printf("\n%td tokens of prompt, %td more one by one: %s\n", prompt, max_tokens - prompt,
                largest < 1e-6f ? "the same as all at once" : "DIFFERENT from all at once");
    return 0;
}

} // namespace

int main(int count, char** arguments) {
    const std::string_view stored_in = count > 1 ? arguments[1] : "float";
    if (stored_in == "float") return decode<float>();
    if (stored_in == "bfloat16") return decode<Eigen::bfloat16>();
    if (stored_in == "half") return decode<Eigen::half>();
    std::fprintf(stderr, "usage: decoder [float | bfloat16 | half]\n");
    return 1;
}
