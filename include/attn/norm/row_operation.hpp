// What norms of rows compute of one row: layer_norm, rms_norm and unit_norm; and how they write it.
#pragma once

#include "../kernel/tile_loader.hpp"
#include "../simd/unfused.hpp"
#include "../simd/wide_sum.hpp"
#include "rows_in_and_out.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// What a row is divided by: the root of its variance, the root of its mean square, its Euclidean norm.
enum class row_norm { centred, root_mean_square, unit };

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

/// What a row is multiplied by after its norm, and what is then added.
enum class affine { none, weight, bias };

/// What a pass over rows does with them. weight and bias are (channels), or null: of `affine::bias` the weight may be. Rows are widened on
/// their way to registers, and rounded on the way back.
template <bool centred, Scalar T, class E, affine has>
struct row_passes {
    using lanes = simd::lanes<T>;
    using operand = simd::operand_lanes<E>;
    index_t channels;
    const T* weight = nullptr;
    const T* bias = nullptr;
    bool streaming = false; ///< whether the result goes past the caches

    /// ((x - centre) * scale + offset) * weight + bias.
    [[gnu::always_inline]] lanes mapped(lanes x, lanes centre, lanes scale, lanes offset, index_t c, const auto& load) const {
        if constexpr (centred) x = fma(x - centre, scale, offset);
        else x = x * scale;
        if constexpr (has == affine::bias) return fma(x, weight ? load(weight + c) : lanes(1), load(bias + c));
        else if constexpr (has == affine::weight) return x * load(weight + c);
        else return x;
    }

    /// Sums the row `next` (if sums), while it writes the row `x` (if writes), which may be `out`. Reading one row from memory beside the
    /// writing of another keeps both streams of memory busy; a row that is summed and then written makes them take turns. Chains of sums
    /// hide the latency of adding, and keep partial sums short.
    template <bool sums, bool writes, bool past_caches = false>
    [[gnu::always_inline]] row_sums<T> pass(const E* next, T from, const E* x, E* out, const row_map<T>& map) const {
        constexpr index_t ahead = 6144 / sizeof(E);
        const lanes shift(from), centre(map.centre), scale(map.scale), offset(map.offset);
        simd::wide_sum<T, 128> total, squares;
        simd::for_each_part<T, 128>(channels, [&](index_t c, auto part, auto count) __attribute__((always_inline)) {
            constexpr bool is_whole = !std::same_as<decltype(count), index_t>;
            const auto read = [&](const E* p) __attribute__((always_inline)) {
                if constexpr (is_whole) return operand::load(p);
                else return operand::load_first(p, count);
            };
            const auto load = [&](const T* p) __attribute__((always_inline)) {
                if constexpr (is_whole) return lanes::load(p);
                else return lanes::load_first(p, count);
            };
            if constexpr (sums) {
                lanes d = read(next + c);
                if constexpr (centred) {
                    d = d - shift;
                    if constexpr (!is_whole) d = select(simd::lane_bits::first(count), d, lanes(0));
                    total.add(part, d);
                }
                squares.add(part, d, d);
                if constexpr (is_whole) simd::prefetch(next + c + ahead);
            }
            if constexpr (writes) {
                const auto y = mapped(read(x + c), centre, scale, offset, c, load);
                if constexpr (sums && is_whole && !past_caches) simd::prefetch_to_write(out + c + ahead);
                if constexpr (is_whole) kernel::store_stored<past_caches>(y, out + c);
                else kernel::store_first_stored(y, out + c, count);
            }
        });
        if constexpr (!sums) return {};
        else return {centred ? total.total() : T{0}, squares.total()};
    }
    /// The sums of a row by themselves.
    [[gnu::noinline]] row_sums<T> sums_of(const E* row, T from) const { return pass<true, false>(row, from, nullptr, nullptr, {}); }
    /// Writes a row by itself.
    [[gnu::noinline]] void write(const E* x, E* out, const row_map<T>& map) const { pass<false, true>(nullptr, T{0}, x, out, map); }
    /// Both.
    row_sums<T> sum_and_write(const E* next, const E* x, E* out, const row_map<T>& map) const {
        return streaming ? pass<true, true, true>(next, next[0], x, out, map) : pass<true, true>(next, next[0], x, out, map);
    }
};

/// The passes of a norm, and what its rows are multiplied by.
template <row_norm kind, Scalar T, class E = T, affine has = affine::none>
struct row_operation : row_passes<kind == row_norm::centred, T, E, has> {
    using stored = E; ///< what the rows are
    static constexpr bool centred = kind == row_norm::centred, is_unit = kind == row_norm::unit;

    /// Of the sum of its squares and their number. `eps` is added to a mean, but a least norm.
    static double scale_of(double squares, double count, double eps) {
        if constexpr (is_unit) return 1 / std::max(std::sqrt(squares), eps);
        else return 1 / std::sqrt(squares / count + eps);
    }
    /// What `eps` is beside squares.
    static constexpr double squared(double eps) { return is_unit ? eps * eps : eps; }
};

/// Whether the squares neither overflowed nor sank below the normal numbers, unless eps is large beside what was lost.
template <Scalar T>
bool squares_in_range(T squares, double eps) {
    constexpr double lost = static_cast<double>(std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon());
    return squares <= std::numeric_limits<T>::max() && (static_cast<double>(squares) >= lost || eps >= lost);
}

/// The map of a row from a scaled copy of its numbers, in double: for rows whose squares leave the range of T. Infinity and NaN end here
/// too: a NaN makes NaN of the row; an infinity makes NaN of a centred row, and otherwise 0 of the others and NaN of itself.
template <class Op>
auto careful_row_map(const Op& op, const typename Op::stored* x, double eps) {
    using T = computed_in<typename Op::stored>;
    const auto number = [x](index_t c) { return static_cast<double>(static_cast<T>(x[c])); };
    const auto channels = op.channels;
    double least = 0, greatest = 0, sum_of_all = 0;
    for (index_t c = 0; c < channels; ++c) {
        const auto value = number(c);
        least = std::min(least, value);
        greatest = std::max(greatest, value);
        sum_of_all += value - value; // NaN if any is not finite
    }
    constexpr auto nan = std::numeric_limits<T>::quiet_NaN();
    if (std::isnan(sum_of_all)) {
        bool any_nan = false;
        for (index_t c = 0; c < channels; ++c) any_nan = any_nan || std::isnan(number(c));
        return Op::centred || any_nan ? row_map<T>{0, nan, nan} : row_map<T>{0, 0, 0};
    }
    const auto largest = std::max(greatest, -least);
    const auto exponent = largest > 0 ? std::ilogb(largest) : 0;
    const auto scaled = [&](index_t c) { return std::scalbn(number(c), -exponent); };
    const auto count = Op::is_unit ? 1 : static_cast<double>(channels);
    double mean = 0, squares = 0;
    for (index_t c = 0; Op::centred && c < channels; ++c) mean += scaled(c) / count;
    for (index_t c = 0; c < channels; ++c) squares += (scaled(c) - mean) * (scaled(c) - mean) / count;
    const auto scale = std::scalbn(Op::scale_of(squares, 1, std::scalbn(eps, (Op::is_unit ? -1 : -2) * exponent)), -exponent);
    const auto unscaled = std::scalbn(mean, exponent);
    // Where differences leave the range of T the deviation is about as large as the numbers, and nothing cancels without a centre.
    const bool differences_fit = greatest / 2 - least / 2 <= static_cast<double>(std::numeric_limits<T>::max()) / 2;
    const auto centre = differences_fit ? static_cast<T>(unscaled) : T{0};
    return row_map<T>{centre, static_cast<T>(scale), static_cast<T>((static_cast<double>(centre) - unscaled) * scale)};
}

/// (x - mean) / sqrt(variance + eps) as a map, from the sums of x - x[0], which lose no digits to a common offset. Should x[0] lie far from
/// the rest of its row, they are taken again from the mean that they tell. The mean is kept as centre + rest, for x - centre is nearly
/// exact and a mean rounded to T is not.
template <class Op, Scalar T>
[[gnu::always_inline]] inline row_map<T> centred_map(const Op& op, const typename Op::stored* x, row_sums<T> sums, double eps) {
    const auto count = static_cast<double>(op.channels), part = 1 / count;
    T shift = x[0];
    auto from_shift = simd::unfused(static_cast<double>(sums.total) * part);
    if (const auto lost = simd::unfused(from_shift * from_shift * count); lost > 8 * (static_cast<double>(sums.squares) - lost))
        [[unlikely]] {
        shift = static_cast<T>(static_cast<double>(shift) + from_shift);
        sums = op.sums_of(x, shift);
        from_shift = simd::unfused(static_cast<double>(sums.total) * part);
    }
    if (!squares_in_range(sums.squares, eps)) [[unlikely]]
        return careful_row_map(op, x, eps);
    const auto variance = std::max(0.0, simd::unfused(static_cast<double>(sums.squares) * part) - simd::unfused(from_shift * from_shift));
    const auto scale = 1 / std::sqrt(variance + eps);
    const auto centre = static_cast<T>(static_cast<double>(shift) + from_shift);
    const auto rest = static_cast<double>(shift - centre) + from_shift;
    return {centre, static_cast<T>(scale), static_cast<T>(-rest * scale)};
}

/// x / sqrt(mean(x^2) + eps) or x / max(|x|, eps) as a map, from the sum of x^2.
template <class Op, Scalar T>
[[gnu::always_inline]] inline row_map<T> scaling_map(const Op& op, const typename Op::stored* x, T squares, double eps) {
    if (!squares_in_range(squares, Op::squared(eps))) [[unlikely]]
        return careful_row_map(op, x, eps);
    return {0, static_cast<T>(Op::scale_of(static_cast<double>(squares), static_cast<double>(op.channels), eps)), 0};
}

/// The map of a row, from its sums.
template <class Op, Scalar T>
[[gnu::always_inline]] inline row_map<T> map_of(const Op& op, const typename Op::stored* x, const row_sums<T>& sums, double eps) {
    if constexpr (Op::centred) return centred_map(op, x, sums, eps);
    else return scaling_map(op, x, sums.squares, eps);
}

/// Normalises the rows of a run. The sums run two rows ahead of the writing, so that nothing waits for the square root of a row.
template <class Op, class E>
void normalise_rows(const Op& op, const row_block<const E>& x, const row_block<E>& out, index_t count, double eps) {
    using T = computed_in<E>;
    constexpr index_t ahead = 2;
    row_map<T> maps[ahead];
    for (index_t r = 0; r < std::min(ahead, count); ++r) {
        const auto* const row = x.address(r);
        maps[r] = map_of(op, row, op.sums_of(row, row[0]), eps);
    }
    for (index_t r = 0; r < count; ++r) {
        auto& map = maps[r % ahead];
        if (r + ahead < count) {
            const auto* const next = x.address(r + ahead);
            map = map_of(op, next, op.sum_and_write(next, x.address(r), out.address(r), map), eps);
        } else {
            op.write(x.address(r), out.address(r), map);
        }
    }
    if (op.streaming) simd::finish_streaming();
}

/// The forward of a norm of rows. weight, bias: (channels) each, or empty.
template <row_norm kind, Scalar T>
void normalise_tokens(const stored_view<const T>& x, const stored_view<T>& out, std::span<const T> weight, std::span<const T> bias,
                      double eps, const execution& run) {
    const rows_in_and_out<T> pairs(x, out, run.workspace().bytes().data());
    const auto forward_as = [&]<class E, affine has>(std::type_identity<E>, std::integral_constant<affine, has>) {
        const row_operation<kind, T, E, has> op{
            {x.shape().channels, weight.empty() ? nullptr : weight.data(), bias.data(), worth_streaming(x, out, narrow_format_of<E>)}};
        pairs.template for_each_run_in<E>(run, [&](const row_block<const E>& rows, const row_block<E>& out_rows, index_t count) {
            normalise_rows(op, rows, out_rows, count, eps);
        });
    };
    kernel::with_format<T>(x.format() == out.format() ? x.format() : narrow_format::none, [&](auto stored) {
        if (kind == row_norm::centred && !bias.empty()) forward_as(stored, std::integral_constant<affine, affine::bias>());
        else if (!weight.empty()) forward_as(stored, std::integral_constant<affine, affine::weight>());
        else forward_as(stored, std::integral_constant<affine, affine::none>());
    });
}

} // namespace attn::detail
