// Which of the compiled instruction sets a call runs.
#include <attn/compiled.hpp>

#include <stdexcept>

extern "C" {
#ifdef __aarch64__
void attn_compiled_neon(const attn::compiled_library::call&);
#else
void attn_compiled_sse2(const attn::compiled_library::call&);
void attn_compiled_avx2(const attn::compiled_library::call&);
void attn_compiled_avx512(const attn::compiled_library::call&);
#endif
}

namespace attn::compiled_library {

#ifdef __aarch64__
namespace {
constexpr auto narrowest = target::neon;
constexpr decltype(&attn_compiled_neon) functions[] = {attn_compiled_neon};
} // namespace

target widest() { return target::neon; }
#else
namespace {
constexpr auto narrowest = target::sse2;
constexpr decltype(&attn_compiled_sse2) functions[] = {attn_compiled_sse2, attn_compiled_avx2, attn_compiled_avx512};
} // namespace

target widest() {
    const auto supported = [] {
        __builtin_cpu_init();
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return target::sse2;
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
        return avx512 ? target::avx512 : target::avx2;
    };
    static const auto found = supported();
    return found;
}
#endif

bool runs(target where) { return narrowest <= where && where <= widest(); }

void run(const call& c, target where) {
    if (!runs(where)) throw std::invalid_argument("attn::compiled: this processor does not run the instruction set that is asked for");
    functions[static_cast<int>(where) - static_cast<int>(narrowest)](c);
}

} // namespace attn::compiled_library
