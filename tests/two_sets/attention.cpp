// One source, compiled for two instruction sets: ATTEND names the function of each.
#include <attn/attn.hpp>
#include <attn/layer/multi_head.hpp>

#include <vector>

/// Operators, patterns, errors and merging, as far as numbers go: what the compiler does not inline is in the object as symbols.
extern "C" int ATTEND(long tokens, long channels, const float* qkv, float* out, double* linear) {
    const attn::shape s{.tokens = tokens, .channels = channels};
    const auto x = attn::head_major(qkv, s);
    const attn::inputs<float> in{x, x, x};
    attn::thread_pool threads(2);
    const attn::softmax_attention op{.pattern = attn::causal{} & (attn::pattern::local{8, 0} | attn::pattern::strided{4})};
    attn::workspace memory(attn::workspace_bytes<float>(op, shapes_of(in), threads));
    attn::attend(op, in, attn::outputs<float>{attn::head_major(out, s)}, attn::execution(threads, memory));

    std::vector<double> wide(qkv, qkv + tokens * channels);
    const auto y = attn::head_major<const double>(wide.data(), s);
    const auto result = attn::attend(attn::linear_attention<attn::relu>{}, attn::inputs<double>{y, y, y}, threads);
    for (attn::index_t e = 0; e < result.shape().size(); ++e) linear[e] = result.data()[e];

    const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 3);
    if (!attn::segments(ids).at(0, 0).visible(0, tokens - 1)) return 0;
    const attn::rotary<float> turns(tokens, channels);
    attn::tensor<float> copy(s);
    attn::rotate(turns, copy, 0, copy, threads);
    try {
        (void)attn::attend(op, attn::inputs<float>{x, x, x, {.first_query = attn::farthest_position + 1}}, threads);
        return 0;
    } catch (const std::exception&) { return attn::simd::lanes<float>::size; }
}
