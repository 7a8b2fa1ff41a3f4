// What layer_norm and rms_norm compute of one row, and how they write it.
#pragma once

#include "../simd/lanes.hpp"
#include "../simd/unroll.hpp"
#include "row_pairs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::detail {

/// A row is written as (x - centre) * scale + offset, before weight and bias.
template <Scalar T>
struct row_map {
    T centre, scale, offset;
};

/// Sums over a row: of x - shift, and of its squares.
template <Scalar T>
struct row_sums {
    T total, squares;
};

/// Four chains of registers: more in flight, and shorter partial sums.
template <class Arch, bool centred, Scalar T>
[[gnu::always_inline]] inline row_sums<T> sums_of_row(const T* x, index channels, T from) {
    using lanes = simd::lanes<T, Arch>;
    constexpr int chains = 4, size = lanes::size;
    const lanes shift(from);
    lanes total[chains], squares[chains];
    simd::unroll<chains>([&](auto k) { total[k] = squares[k] = lanes(0); });
    index c = 0;
    for (; c + chains * size <= channels; c += chains * size) {
        simd::unroll<chains>([&](auto k) {
            auto d = lanes::load(x + c + k * size);
            if constexpr (centred) d -= shift, total[k] += d;
            squares[k] = fma(d, d, squares[k]);
#ifdef PFX
            simd::prefetch(x + c + k * size + PFX);
#endif
        });
    }
    for (; c + size <= channels; c += size) {
        auto d = lanes::load(x + c);
        if constexpr (centred) d -= shift, total[0] += d;
        squares[0] = fma(d, d, squares[0]);
    }
    if (const auto left = channels - c; left > 0) {
        auto d = lanes::load_first(x + c, left);
        if constexpr (centred) d = select(simd::lane_bits::first(left), d - shift, lanes(0)), total[1] += d;
        squares[1] = fma(d, d, squares[1]);
    }
    return {centred ? sum((total[0] + total[1]) + (total[2] + total[3])) : T{0}, sum((squares[0] + squares[1]) + (squares[2] + squares[3]))};
}

/// Whether the squares neither overflowed nor sank below the normal numbers, unless eps is large beside what was lost.
template <Scalar T>
bool squares_in_range(T squares, double eps) {
    constexpr double lost = static_cast<double>(std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon());
    return squares <= std::numeric_limits<T>::max() && (static_cast<double>(squares) >= lost || eps >= lost);
}

/// The same row map from a scaled copy of the numbers, in double: for rows whose squares leave the range of T. Infinity and NaN end here
/// too: a NaN makes NaN of the row; an infinity makes NaN of a centred row, and otherwise 0 of the others and NaN of itself.
template <bool centred, Scalar T>
row_map<T> careful_row_map(const T* x, index channels, double eps) {
    double largest = 0, sum_of_all = 0;
    for (index c = 0; c < channels; ++c) {
        const auto value = static_cast<double>(x[c]);
        largest = std::max(largest, std::abs(value));
        sum_of_all += value - value; // NaN if any is not finite
    }
    constexpr auto nan = std::numeric_limits<T>::quiet_NaN();
    if (std::isnan(sum_of_all)) {
        const bool any_nan = std::any_of(x, x + channels, [](T value) { return std::isnan(value); });
        return centred || any_nan ? row_map<T>{0, nan, nan} : row_map<T>{0, 0, 0};
    }
    const auto exponent = largest > 0 ? std::ilogb(largest) : 0;
    const auto scaled = [&](index c) { return std::scalbn(static_cast<double>(x[c]), -exponent); };
    const auto count = static_cast<double>(channels);
    double mean = 0, squares = 0;
    for (index c = 0; centred && c < channels; ++c) mean += scaled(c) / count;
    for (index c = 0; c < channels; ++c) squares += (scaled(c) - mean) * (scaled(c) - mean) / count;
    const auto scale = std::scalbn(1 / std::sqrt(squares + std::scalbn(eps, -2 * exponent)), -exponent);
    const auto unscaled = std::scalbn(mean, exponent);
    const auto centre = static_cast<T>(unscaled);
    return {centre, static_cast<T>(scale), static_cast<T>((static_cast<double>(centre) - unscaled) * scale)};
}

/// (x - mean) / sqrt(variance + eps) as a map, in one pass over the row: the sums are taken of x - x[0], which loses no digits to a common
/// offset. Should x[0] lie far from the rest of its row, a second pass begins at the mean that the first one found. The mean is kept as
/// centre + rest, for x - centre is nearly exact and a mean rounded to T is not.
template <class Arch, Scalar T>
[[gnu::always_inline]] inline row_map<T> layer_norm_map(const T* x, index channels, double eps) {
    const auto count = static_cast<double>(channels), part = 1 / count;
    T shift = x[0];
    auto sums = sums_of_row<Arch, true>(x, channels, shift);
    auto from_shift = static_cast<double>(sums.total) * part;
    if (const auto lost = from_shift * from_shift * count; lost > 8 * (static_cast<double>(sums.squares) - lost)) [[unlikely]] {
        shift = static_cast<T>(static_cast<double>(shift) + from_shift);
        sums = sums_of_row<Arch, true>(x, channels, shift);
        from_shift = static_cast<double>(sums.total) * part;
    }
    if (!squares_in_range(sums.squares, eps)) [[unlikely]]
        return careful_row_map<true>(x, channels, eps);
    const auto variance = std::max(0.0, static_cast<double>(sums.squares) * part - from_shift * from_shift);
    const auto scale = 1 / std::sqrt(variance + eps);
    const auto centre = static_cast<T>(static_cast<double>(shift) + from_shift);
    const auto rest = static_cast<double>(shift - centre) + from_shift;
    return {centre, static_cast<T>(scale), static_cast<T>(-rest * scale)};
}

/// x / sqrt(mean(x^2) + eps) as a map, in one pass over the row.
template <class Arch, Scalar T>
[[gnu::always_inline]] inline row_map<T> rms_norm_map(const T* x, index channels, double eps) {
    const auto squares = sums_of_row<Arch, false>(x, channels, T{0}).squares;
    if (!squares_in_range(squares, eps)) [[unlikely]]
        return careful_row_map<false>(x, channels, eps);
    return {0, static_cast<T>(1 / std::sqrt(static_cast<double>(squares) / static_cast<double>(channels) + eps)), 0};
}

/// ((x - centre) * scale + offset) * weight + bias.
template <bool centred, bool has_weight, bool has_bias, class V>
[[gnu::always_inline]] inline V mapped(V x, V centre, V scale, V offset, V weight, V bias) {
    if constexpr (centred) x = fma(x - centre, scale, offset);
    else x = x * scale;
    if constexpr (has_weight && has_bias) return fma(x, weight, bias);
    else if constexpr (has_weight) return x * weight;
    else if constexpr (has_bias) return x + bias;
    else return x;
}

/// Writes some neighbouring rows, which share the loads of weight and bias. Out may be x.
template <class Arch, bool centred, bool has_weight, bool has_bias, int rows, Scalar T>
[[gnu::always_inline]] inline void write_rows(const T* x, index x_stride, T* out, index out_stride, index channels, const row_map<T>* maps,
                                              const T* weight, const T* bias) {
    using lanes = simd::lanes<T, Arch>;
    constexpr int size = lanes::size;
    lanes centre[rows], scale[rows], offset[rows], w(0), b(0);
    simd::unroll<rows>([&](auto r) {
        centre[r] = lanes(maps[r].centre);
        scale[r] = lanes(maps[r].scale);
        offset[r] = lanes(maps[r].offset);
    });
    index c = 0;
    for (; c + size <= channels; c += size) {
        if constexpr (has_weight) w = lanes::load(weight + c);
        if constexpr (has_bias) b = lanes::load(bias + c);
        simd::unroll<rows>([&](auto r) {
            const auto y = mapped<centred, has_weight, has_bias>(lanes::load(x + r * x_stride + c), centre[r], scale[r], offset[r], w, b);
            y.store(out + r * out_stride + c);
#ifdef PFO
            __builtin_prefetch(out + r * out_stride + c + PFO, 1);
#endif
        });
    }
    if (const auto left = channels - c; left > 0) {
        if constexpr (has_weight) w = lanes::load_first(weight + c, left);
        if constexpr (has_bias) b = lanes::load_first(bias + c, left);
        simd::unroll<rows>([&](auto r) {
            const auto y = mapped<centred, has_weight, has_bias>(lanes::load_first(x + r * x_stride + c, left), centre[r], scale[r], offset[r], w, b);
            y.store_first(out + r * out_stride + c, left);
        });
    }
}

/// Normalises the rows of a run. The sums run ahead of the writing by as many rows as are written together, so that nothing waits for the
/// square root of a row, and both read and write memory in order.
template <class Arch, bool centred, bool has_weight, bool has_bias, Scalar T, class F>
void normalise_rows(const row_run<T>& run, index channels, const T* weight, const T* bias, const F& map_of) {
    const auto write = [&](auto rows, index first, const row_map<T>* maps) {
        write_rows<Arch, centred, has_weight, has_bias, rows()>(run.x + first * run.x_stride, run.x_stride, run.out + first * run.out_stride,
                                                                run.out_stride, channels, maps, weight, bias);
    };
#ifndef TOG
#define TOG 2
#endif
    constexpr int together = TOG;
    row_map<T> maps[2 * together];
    index known = 0;
    const auto learn = [&](index end) {
        for (; known < end; ++known) maps[known % (2 * together)] = map_of(run.x + known * run.x_stride);
    };
    index first = 0;
    for (; first + together <= run.count; first += together) {
        learn(std::min(first + 2 * together, run.count));
        write(std::integral_constant<int, together>{}, first, maps + first % (2 * together));
    }
    learn(run.count);
    for (; first < run.count; ++first) write(std::integral_constant<int, 1>{}, first, maps + first % (2 * together));
}

} // namespace attn::detail
