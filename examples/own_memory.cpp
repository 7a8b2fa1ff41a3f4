// Attention on memory of your own: three layouts of the same numbers, threads, and a call that allocates nothing.
#include <attn/attention/softmax_attention.hpp>
#include <attn/core/copy.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

int main() {
    const attn::shape tokens{.batch = 2, .heads = 8, .tokens = 100, .channels = 64};
    const auto size = static_cast<std::size_t>(tokens.size());

    // [batch][heads][tokens][channels], each tensor in a vector of its own.
    std::vector<float> q(size), k(size), v(size), out(size);
    std::mt19937 random(1);
    for (auto* x : {&q, &k, &v}) std::ranges::generate(*x, [&] { return static_cast<float>(random()) / 0x1p31f - 1; });
    const attn::inputs<float> by_heads{
        .queries = attn::head_major<const float>(q.data(), tokens),
        .keys = attn::head_major<const float>(k.data(), tokens),
        .values = attn::head_major<const float>(v.data(), tokens),
    };

    // The workspace is asked for once, and serves every call of such shapes.
    const auto op = attn::softmax_attention{.pattern = attn::causal{}};
    attn::thread_pool threads;
    attn::workspace memory(attn::workspace_bytes<float>(op, shapes_of(by_heads), threads));
    const attn::execution run(threads, memory);
    attn::attend(op, by_heads, attn::outputs<float>{attn::head_major(out.data(), tokens)}, run);

    // [batch][tokens][q, k, v][heads][channels]: what one linear layer for all three leaves behind. A view is a pointer, a shape and
    // strides.
    std::vector<float> packed(3 * size), packed_out(size);
    const attn::index_t row = tokens.heads * tokens.channels;
    const auto part = [&](attn::index_t which) {
        return attn::tensor_view<float>(packed.data() + which * row, tokens,
                                        {.batch = tokens.tokens * 3 * row, .heads = tokens.channels, .tokens = 3 * row, .channels = 1});
    };
    attn::copy(attn::head_major(q.data(), tokens), part(0));
    attn::copy(attn::head_major(k.data(), tokens), part(1));
    attn::copy(attn::head_major(v.data(), tokens), part(2));

    // The result goes to [batch][tokens][heads][channels], where the next linear layer reads it.
    const auto by_tokens = attn::token_major(packed_out.data(), tokens);
    attn::attend(op, attn::inputs<float>{part(0), part(1), part(2)}, attn::outputs<float>{by_tokens}, run);

    std::vector<float> again(size);
    copy(by_tokens, attn::head_major(again.data(), tokens));
    std::printf("q, k, v of shape %s\n", to_string(tokens).c_str());
    std::printf("the same bits from packed memory: %s\n", again == out ? "yes" : "no");

    // What does not fit is refused before anything is read or written.
    try {
        attn::attend(op, by_heads, attn::outputs<float>{attn::head_major(q.data(), tokens)}, run);
    } catch (const attn::attention_error& error) { std::printf("%s\n", error.what()); }
}
