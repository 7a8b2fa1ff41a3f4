// attn_wasm_addresses NUMBER: a call that would take more memory than 32 bits address, each in bytes that 32 bits would cut to few or none. It
// is refused, which ends the program.
#include <attn/attn.hpp>
#include <attn/layer/rotary.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using attn::index_t, attn::shape, attn::tensor, attn::tensor_view;

const char* expected;

/// A view of numbers of which only the first exist.
tensor_view<const float> huge(const shape& s) {
    static const float number = 0;
    return attn::head_major(&number, s);
}

/// Says that it runs as many bodies at once as an executor may.
struct crowd {
    index_t concurrency() const { return 4096; }
    void parallel_for(index_t count, attn::function_ref body) const {
        for (index_t i = 0; i < count; ++i) body(i);
    }
};

struct call {
    const char* message;
    void (*run)();
};
constexpr index_t k = 1024;
const call calls[] = {
    {"tensor: shape has shape (1, 1, 65536, 16384), which is more than 2^30 bytes", [] { tensor<float>({1, 1, 64 * k, 16 * k}); }},
    {"tensor: shape has shape (4096, 1048576, 1048576, 1048576)", [] { tensor<bool>({4 * k, k * k, k * k, k * k}); }},
    {"softmax_attention: q has shape (1, 1, 1048576, 1024), which is more than 2^30 bytes",
     [] {
         const auto x = huge({1, 1, k * k, k});
         static_cast<void>(attn::attend(attn::softmax_attention{}, x, x, x));
     }},
    {"softmax_attention: k of shape (1, 1, 2, 8) has strides that reach beyond 2^30 bytes",
     [] {
         const auto x = huge({1, 1, 2, 8});
         const tensor_view<const float> far(x.data(), x.shape(), {.tokens = k * k * k});
         static_cast<void>(attn::attend(attn::softmax_attention{}, x, far, x));
     }},
    {"workspace: size for such shapes would be more than 2^30 bytes",
     [] {
         const tensor<float> x({1, 1, 16, 1024});
         static_cast<void>(attn::attend(attn::linear_attention<>{}, x, x, x, crowd()));
     }},
    {"workspace: size for such shapes would be more than 2^30 bytes", [] { attn::detail::scratch().take<float>(k * k, k); }},
    {"workspace: size of 2147483648 bytes is more than 2^30 bytes", [] { attn::workspace(std::size_t{1} << 31); }},
    {"rotary: table ", [] { attn::rotary<float>(k * k, 2 * k); }},
    {"tiles: size ", [] { attn::pattern::tiles([](index_t, index_t) { return true; }, k * k, k * k); }},
    {"pool_bytes: pages ", [] { static_cast<void>(attn::pool_bytes<float>({.kv_heads = 8, .key_channels = 128, .value_channels = 128}, k * k)); }},
};

/// What ends a call that is refused: with 0, if it is said why.
void told(attn::error_kind, const char* message) {
    const bool is_expected = std::strstr(message, expected) != nullptr;
    if (!is_expected) std::printf("\"%s\", not \"%s\"\n", message, expected);
    std::exit(is_expected ? 0 : 1);
}

} // namespace

int main(int count, char** arguments) {
    const auto number = static_cast<std::size_t>(count == 2 ? std::atoi(arguments[1]) : 0);
    expected = calls[number].message;
    attn::set_error_handler(told);
    calls[number].run();
    std::puts("not refused");
    return 1;
}
