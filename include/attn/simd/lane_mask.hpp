// A condition for each lane of a register: as bits, and in the form that the instruction set selects with.
#pragma once

#include "../core/scalar.hpp"

#include <array>
#include <bit>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc 12 warns inside its own AVX-512 header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#ifdef __wasm__ // xsimd looks for Emscripten, not for the processor
#include <xsimd/config/xsimd_config.hpp>
#undef XSIMD_NO_SUPPORTED_ARCHITECTURE
#undef XSIMD_WITH_WASM
#define XSIMD_WITH_WASM 1
#endif
#include <xsimd/xsimd.hpp>

#if defined(__wasm__) && XSIMD_VERSION_MAJOR < 12
#error "attn needs xsimd 12 or later for WebAssembly"
#elif XSIMD_VERSION_MAJOR < 8 || (XSIMD_VERSION_MAJOR == 8 && XSIMD_VERSION_MINOR < 1)
#error "attn needs xsimd 8.1 or later"
#elif defined(XSIMD_NO_SUPPORTED_ARCHITECTURE)
#error "attn: xsimd has no instruction set here; xsimd 10 emulates one: -DXSIMD_WITH_EMULATED=1 -DXSIMD_DEFAULT_ARCH=xsimd::emulated<128>"
#endif

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

// Registers are those of the best instruction set this translation unit is compiled for. One program may hold several: all of attn lives in
// an inline namespace named after the set (core/instruction_set.hpp), so objects for two sets share none of its symbols, and types of two
// sets differ. What std and Eigen instantiate in both objects they do share: cmake/README.md, "Versions and small print".
#if defined(__AVX512F__)
static_assert(std::is_base_of_v<xsimd::avx512f, xsimd::default_arch>,
              "attn: XSIMD_DEFAULT_ARCH is another instruction set than the compiler's");
#endif

/// One bit per lane, bit l for lane l: the result of comparing positions. Plain integer work, free beside the floating point.
struct lane_bits {
    std::uint64_t value = 0;

    /// The first `count` lanes.
    static constexpr lane_bits first(index_t count) { return {count <= 0 ? 0 : ~std::uint64_t{0} >> (64 - (count < 64 ? count : 64))}; }
    friend constexpr lane_bits operator&&(lane_bits a, lane_bits b) { return {a.value & b.value}; }
    friend constexpr lane_bits operator||(lane_bits a, lane_bits b) { return {a.value | b.value}; }
    friend constexpr lane_bits operator!(lane_bits a) { return {~a.value}; }
    friend constexpr lane_bits operator&&(lane_bits a, bool b) { return {b ? a.value : 0}; }
    friend constexpr lane_bits operator||(lane_bits a, bool b) { return {b ? ~std::uint64_t{0} : a.value}; }
    friend constexpr lane_bits operator&&(bool a, lane_bits b) { return b && a; }
    friend constexpr lane_bits operator||(bool a, lane_bits b) { return b || a; }
    friend constexpr bool operator==(lane_bits, lane_bits) = default;
};

/// A condition per lane, in the form the instruction set selects with.
template <Scalar T>
struct lane_mask {
    xsimd::batch_bool<T> value;

    /// The condition whose lane l is bit l.
    static lane_mask from_bits(lane_bits bits) {
        using condition = xsimd::batch_bool<T>;
#if defined(__AVX512F__)
        return {condition(static_cast<typename condition::register_type>(bits.value))};
#else
        using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
        using integers = xsimd::batch<integer>;
        static constexpr auto bit_of_lane = [] {
            std::array<integer, condition::size> bit{};
            for (std::size_t l = 0; l < bit.size(); ++l) bit[l] = integer{1} << l;
            return bit;
        }();
        const auto own_bit = integers::load_unaligned(bit_of_lane.data());
        return {std::bit_cast<condition>((integers(static_cast<integer>(bits.value)) & own_bit) == own_bit)};
#endif
    }
    lane_bits bits() const {
#if defined(__AVX512F__)
        return {static_cast<std::uint64_t>(value.data)};
#else
        std::array<bool, xsimd::batch_bool<T>::size> stored;
        value.store_unaligned(stored.data());
        lane_bits result;
        for (std::size_t l = 0; l < stored.size(); ++l) result.value |= std::uint64_t{stored[l]} << l;
        return result;
#endif
    }

    friend lane_mask operator&&(lane_mask a, lane_mask b) { return {a.value && b.value}; }
    friend lane_mask operator||(lane_mask a, lane_mask b) { return {a.value || b.value}; }
    friend lane_mask operator!(lane_mask a) { return {!a.value}; }
};

} // namespace attn::simd

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
