// One program for every processor: this file is compiled four times, once as the program, and once for each instruction set, as a shared
// library of its own. Functions that the compiler did not inline exist in each library, in its instruction set; hidden symbols keep one
// library from calling another's (see CMakeLists.txt: -fvisibility=hidden, -Bsymbolic).
#ifdef ATTEND

// A library: attention on plain pointers, with whatever instruction set the compiler was told to use.
#include <attn/attention/softmax_attention.hpp>
#include <attn/simd/lanes.hpp>

extern "C" __attribute__((visibility("default"))) int ATTEND(long tokens, long channels, const float* qkv, float* out) {
    const attn::shape s{.tokens = tokens, .channels = channels};
    const auto x = attn::head_major(qkv, s);
    attn::sequential here;
    const attn::softmax_attention<> op;
    attn::workspace memory(attn::workspace_bytes<float>(op, {s, s, s}, here));
    attn::attend(op, attn::inputs<float>{x, x, x}, attn::outputs<float>{attn::head_major(out, s)}, attn::execution(here, memory));
    return attn::simd::lanes<float, attn::simd::native>::size;
}

#else

// The program: asks the processor, and knows nothing of attn.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

extern "C" {
int attend_sse2(long tokens, long channels, const float* qkv, float* out);
int attend_avx2(long tokens, long channels, const float* qkv, float* out);
int attend_avx512(long tokens, long channels, const float* qkv, float* out);
}

int main() {
    struct choice {
        const char* name;
        bool runs_here;
        int (*attend)(long, long, const float*, float*);
    };
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const choice choices[] = {{"SSE2", true, attend_sse2}, {"AVX2", avx2, attend_avx2}, {"AVX-512", avx512, attend_avx512}};

    constexpr long tokens = 100, channels = 16;
    std::vector<float> x(tokens * channels), first;
    std::mt19937 random(1);
    std::ranges::generate(x, [&] { return static_cast<float>(random()) / 0x1p31f - 1; });
    const auto close = [](float a, float b) { return std::abs(a - b) < 1e-6f; };
    bool agree = true;
    for (const auto& [name, runs_here, attend] : choices) {
        if (!runs_here) continue;
        std::vector<float> out(x.size());
        const int lanes = attend(tokens, channels, x.data(), out.data());
        std::fprintf(stderr, "%s: %d lanes\n", name, lanes);
        if (first.empty()) first = out;
        agree = agree && std::ranges::equal(first, out, close);
    }
    std::printf("every instruction set that runs here gives the same to rounding: %s\n", agree ? "yes" : "no");
    return agree ? 0 : 1;
}

#endif
