// One program for every processor: attn::compiled holds the usual operators for SSE2, AVX2 and AVX-512, on AArch64 for Advanced SIMD. A call
// runs the widest that the processor has, unless it asks for another.
#include <attn/compiled.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

int main() {
    constexpr attn::shape s{.tokens = 100, .channels = 16};
    std::vector<float> x(static_cast<std::size_t>(s.size())), widest(x.size());
    std::mt19937 random(1);
    std::ranges::generate(x, [&] { return static_cast<float>(random()) / 0x1p31f - 1; });
    const auto tokens = attn::head_major<const float>(x.data(), s);
    const attn::inputs<float> in{tokens, tokens, tokens};

    const attn::compiled::softmax_attention<float> op{.pattern = attn::causal{} & attn::pattern::local{20}};
    attn::compiled::attend(op, in, {attn::head_major(widest.data(), s)});

    using enum attn::compiled::target;
    bool agree = true;
    for (const auto& [target, name] :
         {std::pair(sse2, "SSE2"), std::pair(avx2, "AVX2"), std::pair(avx512, "AVX-512"), std::pair(neon, "Advanced SIMD")}) {
        if (!attn::compiled::runs(target)) continue;
        std::vector<float> out(x.size());
        attn::compiled::attend(op, in, {attn::head_major(out.data(), s)}, attn::sequential(), target);
        agree = agree && std::ranges::equal(out, widest, [](float a, float b) { return std::abs(a - b) < 1e-6f; });
        std::fprintf(stderr, "%s runs here\n", name);
    }
    std::printf("every instruction set that runs here gives the same to rounding: %s\n", agree ? "yes" : "no");
    return agree ? 0 : 1;
}
