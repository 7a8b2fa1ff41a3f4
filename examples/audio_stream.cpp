// Streaming attention over audio: frames come in chunks of whatever size, each sees those of the last two seconds, and the cache is a ring. What
// comes out has the bits of one call with all frames.
#include <attn/cache/attend.hpp>
#include <attn/core/tensor.hpp>
#include <attn/attention/sparse_attention.hpp>

#include <algorithm>
#include <cstdio>

int main() {
    using attn::index_t;
    constexpr index_t frames = 3000, heads = 4, channels = 32, context = 200; // half a minute of 100 frames a second
    const attn::shape s{.heads = heads, .tokens = frames, .channels = channels};
    // Of a model these are what its linears make of the frames.
    const auto q = attn::tensor<float>::random(s, 1), k = attn::tensor<float>::random(s, 2), v = attn::tensor<float>::random(s, 3);
    const attn::softmax_attention op{.pattern = attn::sliding_window(context)};
    const auto whole = attn::attend(op, q, k, v);

    // Pages of 128 frames: the context needs three, a chunk some more.
    attn::key_value_pool<float> pool({.kv_heads = heads, .key_channels = channels, .value_channels = channels}, 6);
    attn::sequence<float> heard(pool);
    const attn::execution run; // which keeps its workspace from chunk to chunk
    index_t different = 0, most_pages = 0, chunks = 0;
    for (index_t first = 0; first < frames; ++chunks) {
        const index_t count = std::min<index_t>(frames - first, 1 + 37 * chunks % 160); // as the sound card gives them
        const attn::tensor_part chunk{.tokens = {first, count}};
        heard.append(k.slice(chunk), v.slice(chunk));
        const auto out = attn::attend(op, q.slice(chunk), heard, run);
        most_pages = std::max(most_pages, pool.pages() - pool.free_pages());
        heard.release(op.pattern); // what no later frame sees

        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < count; ++i)
                different += !std::equal(out.view().row(0, h, i), out.view().row(0, h, i) + channels, whole.view().row(0, h, first + i));
        first += count;
    }
    std::printf("%d frames in %d chunks, %d pages at most: %d rows differ from those of one call\n", static_cast<int>(frames),
                static_cast<int>(chunks), static_cast<int>(most_pages), static_cast<int>(different));
    return different != 0;
}
