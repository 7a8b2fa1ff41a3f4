// What a norm over tokens is once its statistics are known: one line for each channel.
#pragma once

#include "../simd/lanes.hpp"
#include "../simd/unfused.hpp"
#include "../simd/unroll.hpp"
#include "norm.hpp"
#include "rows_in_and_out.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A norm over tokens, at one channel: out = (x - mean) * scale + offset. As a line, its slope is scale and its value at 0 is `at_zero()`.
struct channel_map {
    double mean = 0, scale = 1, offset = 0;

    /// The value at 0.
    double at_zero() const { return offset - simd::unfused(mean * scale); }
};

/// A norm that is one line per channel in inference: batch_norm, rep_batch_norm and progressive_rep_batch_norm with running statistics.
template <class N>
concept FoldableNorm = Norm<N> && requires(const N& norm, index_t c) {
    { norm.map_of(c) } -> std::same_as<channel_map>;
};

/// BN(x) + eta x at one channel: slope weight / sqrt(variance + eps) + eta.
inline channel_map batch_norm_map(double mean, double variance, double weight, double bias, double eps, double eta) {
    return {mean, weight / std::sqrt(variance + eps) + eta, bias + simd::unfused(eta * mean)};
}

namespace detail {

/// The maps of all channels, rounded to T for a kernel: (x - centre) * scale + offset. What mean loses when it is rounded to centre is
/// put into offset, so that a large common offset of x costs no digits.
template <Scalar T>
struct channel_maps {
    T *centre, *scale, *offset; // (channels) each, in whole registers

    static channel_maps in(scratch& memory, index_t channels) {
        return {memory.take<T>(channels), memory.take<T>(channels), memory.take<T>(channels)};
    }

    /// The map of channel c is map_of(c), times `share`.
    void set(index_t channels, double share, const auto& map_of) const {
        for (index_t c = 0; c < channels; ++c) {
            const channel_map map = map_of(c);
            centre[c] = static_cast<T>(map.mean);
            scale[c] = static_cast<T>(share * map.scale);
            offset[c] = static_cast<T>(share * (map.offset + simd::unfused((static_cast<double>(centre[c]) - map.mean) * map.scale)));
        }
    }
};

/// out = (x - centre) * scale + offset, plus `kept` times what out held if blend, for some neighbouring rows, which share the loads of the
/// maps.
template <bool blend, bool streaming, int rows, Scalar T>
[[gnu::always_inline]] inline void map_rows(const row_block<const T>& from, const row_block<T>& to, index_t channels,
                                            const channel_maps<T>& maps, T kept) {
    using lanes = simd::lanes<T>;
    constexpr int size = lanes::size, ahead = 2048 / sizeof(T);
    const T* const x = from.data;
    T* const out = to.data;
    const auto x_stride = from.row_stride, out_stride = to.row_stride;
    const lanes share(kept);
    index_t c = 0;
    for (; c + size <= channels; c += size) {
        const auto centre = lanes::load(maps.centre + c), scale = lanes::load(maps.scale + c), offset = lanes::load(maps.offset + c);
        simd::unroll<rows>([&](auto r) {
            auto y = fma(lanes::load(x + r * x_stride + c) - centre, scale, offset);
            simd::prefetch(x + r * x_stride + c + ahead);
            if constexpr (!streaming) simd::prefetch_to_write(out + r * out_stride + c + ahead);
            if constexpr (blend) y = fma(share, lanes::load(out + r * out_stride + c), y);
            if constexpr (streaming) y.store_streaming(out + r * out_stride + c);
            else y.store(out + r * out_stride + c);
        });
    }
    if (const auto left = channels - c; left > 0) {
        const auto centre = lanes::load_first(maps.centre + c, left), scale = lanes::load_first(maps.scale + c, left),
                   offset = lanes::load_first(maps.offset + c, left);
        simd::unroll<rows>([&](auto r) {
            auto y = fma(lanes::load_first(x + r * x_stride + c, left) - centre, scale, offset);
            if constexpr (blend) y = fma(share, lanes::load_first(out + r * out_stride + c, left), y);
            y.store_first(out + r * out_stride + c, left);
        });
    }
}

/// Maps all rows of x to out, which may be x: one read and one write of the tensor. Single rows in the order of memory if they are
/// streamed, else pairs of them. memory: narrow_bytes of rows_in_and_out.
template <Scalar T>
void map_channels(const stored_view<const T>& x, const stored_view<T>& out, const channel_maps<T>& maps, const execution& run,
                  std::byte* memory) {
    const rows_in_and_out<T> pairs(x, out, memory);
    const auto channels = x.shape().channels;
    with_condition(worth_streaming(x, out), [&](auto streaming) {
        pairs.template for_each_run_in<T>(run, [&](const row_block<const T>& from, const row_block<T>& to, index_t count) {
            constexpr int together = streaming() ? 1 : 2;
            index_t r = 0;
            for (; r + together <= count; r += together)
                map_rows<false, streaming(), together>(from.from(r), to.from(r), channels, maps, T{0});
            for (; r < count; ++r) map_rows<false, streaming(), 1>(from.from(r), to.from(r), channels, maps, T{0});
            if constexpr (streaming()) simd::finish_streaming();
        });
    });
}

} // namespace detail

} // namespace attn
