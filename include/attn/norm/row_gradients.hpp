// What layer_norm and rms_norm compute of one row, how they write it, and their gradient: of each row by itself, and of weight and bias
// over all rows.
#pragma once

#include "../kernel/tile_loader.hpp"
#include "../simd/unfused.hpp"
#include "../simd/wide_sum.hpp"
#include "backward.hpp"
#include "rows_in_and_out.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

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

/// What a pass over rows does with them: weight and bias are (channels), or null where the template says so. Rows are widened on their way
/// to registers, and rounded on the way back.
template <bool centred_, bool has_weight_, bool has_bias_, bool streaming_, Scalar T, class E = T>
struct row_operation {
    using lanes = simd::lanes<T>;
    using stored = E; ///< what the rows are
    using operand = simd::operand_lanes<E>;
    static constexpr bool centred = centred_, has_weight = has_weight_, has_bias = has_bias_, streaming = streaming_;
    index_t channels;
    const T* weight;
    const T* bias;

    /// ((x - centre) * scale + offset) * weight + bias.
    [[gnu::always_inline]] lanes mapped(lanes x, lanes centre, lanes scale, lanes offset, index_t c, const auto& load) const {
        if constexpr (centred) x = fma(x - centre, scale, offset);
        else x = x * scale;
        if constexpr (has_weight && has_bias) return fma(x, load(weight + c), load(bias + c));
        else if constexpr (has_weight) return x * load(weight + c);
        else if constexpr (has_bias) return x + load(bias + c);
        else return x;
    }

    /// Sums the row `next` (if sums), while it writes the row `x` (if writes), which may be `out`. Reading one row from memory beside the
    /// writing of another keeps both streams of memory busy; a row that is summed and then written makes them take turns. Chains of sums
    /// hide the latency of adding, and keep partial sums short.
    template <bool sums, bool writes>
    [[gnu::always_inline]] row_sums<T> pass(const E* next, T from, const E* x, E* out, const row_map<T>& map) const {
        constexpr index_t ahead = 6144 / sizeof(E);
        const lanes shift(from), centre(map.centre), scale(map.scale), offset(map.offset);
        simd::wide_sum<T, 128> total, squares;
        simd::for_each_part<T, 128>(channels, [&](index_t c, auto part, index_t count) __attribute__((always_inline)) {
            const bool is_whole = count == lanes::size;
            if constexpr (sums) {
                auto d = is_whole ? operand::load(next + c) : operand::load_first(next + c, count);
                if constexpr (centred) {
                    d = is_whole ? d - shift : select(simd::lane_bits::first(count), d - shift, lanes(0));
                    total.add(part, d);
                }
                squares.add(part, d, d);
                if (is_whole) simd::prefetch(next + c + ahead);
            }
            if constexpr (writes) {
                if (is_whole) {
                    const auto load = [](const T* p) { return lanes::load(p); };
                    kernel::store_stored<streaming>(mapped(operand::load(x + c), centre, scale, offset, c, load), out + c);
                } else {
                    const auto load = [count](const T* p) { return lanes::load_first(p, count); };
                    kernel::store_first_stored(mapped(operand::load_first(x + c, count), centre, scale, offset, c, load), out + c, count);
                }
            }
        });
        if constexpr (!sums) return {};
        else return {centred ? total.total() : T{0}, squares.total()};
    }
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
    const auto count = static_cast<double>(channels);
    double mean = 0, squares = 0;
    for (index_t c = 0; Op::centred && c < channels; ++c) mean += scaled(c) / count;
    for (index_t c = 0; c < channels; ++c) squares += (scaled(c) - mean) * (scaled(c) - mean) / count;
    const auto scale = std::scalbn(1 / std::sqrt(squares + std::scalbn(eps, -2 * exponent)), -exponent);
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
        sums = op.template pass<true, false>(x, shift, nullptr, nullptr, {});
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

/// x / sqrt(mean(x^2) + eps) as a map, from the sum of x^2.
template <class Op, Scalar T>
[[gnu::always_inline]] inline row_map<T> root_mean_square_map(const Op& op, const typename Op::stored* x, T squares, double eps) {
    if (!squares_in_range(squares, eps)) [[unlikely]]
        return careful_row_map(op, x, eps);
    return {0, static_cast<T>(1 / std::sqrt(static_cast<double>(squares) / static_cast<double>(op.channels) + eps)), 0};
}

/// Normalises the rows of a run. The sums run two rows ahead of the writing, so that nothing waits for the square root of a row.
template <class Op, class E>
void normalise_rows(const Op& op, const row_block<const E>& x, const row_block<E>& out, index_t count, double eps) {
    using T = computed_in<E>;
    constexpr index_t ahead = 2;
    row_map<T> maps[ahead];
    const auto map_of = [&](const E* row, const row_sums<T>& sums) {
        if constexpr (Op::centred) return centred_map(op, row, sums, eps);
        else return root_mean_square_map(op, row, sums.squares, eps);
    };
    for (index_t r = 0; r < std::min(ahead, count); ++r) {
        const auto* const row = x.address(r);
        maps[r] = map_of(row, op.template pass<true, false>(row, row[0], nullptr, nullptr, {}));
    }
    for (index_t r = 0; r < count; ++r) {
        auto& map = maps[r % ahead];
        if (r + ahead < count) {
            const auto* const next = x.address(r + ahead);
            map = map_of(next, op.template pass<true, true>(next, next[0], x.address(r), out.address(r), map));
        } else {
            op.template pass<false, true>(nullptr, T{0}, x.address(r), out.address(r), map);
        }
    }
    if constexpr (Op::streaming) simd::finish_streaming();
}

/// Calls f(std::type_identity of what both are stored as, or of T, streaming, the other conditions...), all constants.
template <Scalar T, class F>
void with_formats(const stored_view<const T>& x, const stored_view<T>& out, const F& f, auto... conditions) {
    kernel::with_format<T>(x.format() == out.format() ? x.format() : narrow_format::none, [&]<class E>(std::type_identity<E> stored) {
        with_conditions([&](auto... known) { f(stored, known...); }, worth_streaming(x, out, narrow_format_of<E>), conditions...);
    });
}

/// The forward of a norm of rows: of weight and bias, (channels) each or empty, by the conditions that each is there, which are constants.
template <bool centred, Scalar T>
void normalise_tokens(const stored_view<const T>& x, const stored_view<T>& out, std::span<const T> weight, std::span<const T> bias,
                      double eps, const execution& run, std::same_as<bool> auto... given) {
    const rows_in_and_out<T> pairs(x, out, run.workspace().bytes().data());
    const auto forward_as = [&]<class E>(std::type_identity<E>, auto streaming, auto has_weight, auto... has_bias) {
        const row_operation<centred, has_weight(), (has_bias() || ...), streaming(), T, E> op{x.shape().channels, weight.data(),
                                                                                              bias.data()};
        pairs.template for_each_run_in<E>(run, [&](const row_block<const E>& rows, const row_block<E>& out_rows, index_t count) {
            normalise_rows(op, rows, out_rows, count, eps);
        });
    };
    with_formats<T>(x, out, forward_as, given...);
}

/// The gradients of a norm of rows. With y = (x - centre) scale + offset, what a row is before weight and bias, and g = d_out * weight:
///     d x = scale (g - mean(g) - y mean(g y)),      d weight = sum over rows of d_out y,      d bias = sum over rows of d_out
/// without mean(g) where rows are not centred. Rows are summed in parts that depend on their number only, and parts one after the other: so
/// threads change no bit.
template <bool centred, Scalar T>
class row_gradients {
public:
    using lanes = simd::lanes<T>;

    static std::size_t workspace_bytes(const shape& x) { return bytes_for<layout>(x); }

    /// weight: (channels), or empty.
    row_gradients(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const norm_gradients<T>& wanted,
                  std::span<const T> weight, double eps)
        : x_(x), d_out_(d_out), wanted_(wanted), weight_(weight.empty() ? nullptr : weight.data()), eps_(eps) {}

    void operator()(const execution& run) const {
        const auto& s = x_.shape();
        scratch memory(run.workspace().bytes().data());
        const layout own(memory, s);
        const row_parts parts(s);
        const auto channels = whole(s.channels);
        if (s.channels == 0) return;
        const auto add_parts = [&](auto streaming) {
            run.for_each(parts.count, [&](index_t part, index_t) {
                T *const of_weight = own.sums + 2 * part * channels, *const of_bias = of_weight + channels;
                std::fill_n(of_weight, 2 * channels, T{0});
                parts.for_each_row(part, [&](index_t r) { add_row<streaming()>(row_place(s, r), of_weight, of_bias); });
                if constexpr (streaming()) simd::finish_streaming();
            });
        };
        with_conditions(add_parts, wanted_.x.data() && worth_streaming<T>(x_, wanted_.x));
        for (const bool of_bias : {false, true}) {
            const auto to = of_bias ? wanted_.bias : wanted_.weight;
            for (index_t c = 0; c < std::ssize(to); ++c) {
                T sum = 0;
                for (index_t part = 0; part < parts.count; ++part) sum += own.sums[(2 * part + of_bias) * channels + c];
                to[static_cast<std::size_t>(c)] = sum;
            }
        }
    }

private:
    struct layout {
        T* sums; ///< [part][weight, bias][channels in whole registers]

        layout(scratch& memory, const shape& x) : sums(memory.take<T>(2 * row_parts(x).count, whole(x.channels))) {}
    };

    static index_t whole(index_t channels) { return (channels + lanes::size - 1) / lanes::size * lanes::size; }

    row_map<T> map_of(const T* row) const {
        const row_operation<centred, false, false, false, T> op{x_.shape().channels, nullptr, nullptr};
        const auto sums = op.template pass<true, false>(row, row[0], nullptr, nullptr, {});
        if constexpr (centred) return centred_map(op, row, sums, eps_);
        else return root_mean_square_map(op, row, sums.squares, eps_);
    }
    template <bool streaming>
    void add_row(const row_place& at, T* of_weight, T* of_bias) const {
        const auto& s = x_.shape();
        const auto [b, h, i] = at;
        const T *const x = x_.row(b, h, i), *const d_out = d_out_.row(b, h, i);
        const auto map = map_of(x);
        const lanes centre(map.centre), scale(map.scale), offset(map.offset);
        const auto y_of = [&](lanes value) {
            if constexpr (centred) return fma(value - centre, scale, offset);
            else return value * scale;
        };
        simd::wide_sum<T, 128> total, products;
        const auto weight_at = [&](index_t c, index_t count) {
            return weight_ ? kernel::load_channels<T>(weight_, 1, c, count) : lanes(1);
        };
        // d_out is 0 behind the row, and x is what it is elsewhere in it: a number.
        const auto x_at = [&](index_t c, index_t count) {
            return count == lanes::size ? lanes::load(x + c)
                                        : select(simd::lane_bits::first(count), lanes::load_first(x + c, count), centre);
        };
        simd::for_each_part<T, 128>(s.channels, [&](index_t c, auto part, index_t count) __attribute__((always_inline)) {
            const auto y = y_of(x_at(c, count)), d_out_here = kernel::load_channels<T>(d_out, 1, c, count),
                       g = d_out_here * weight_at(c, count);
            if constexpr (centred) total.add(part, g);
            products.add(part, g, y);
            fma(d_out_here, y, lanes::load(of_weight + c)).store(of_weight + c);
            (lanes::load(of_bias + c) + d_out_here).store(of_bias + c);
        });
        if (!wanted_.x.data()) return;

        const auto count = static_cast<T>(s.channels);
        const lanes mean(total.total() / count), slope(products.total() / count);
        const auto gradient = [&](lanes value, lanes d_out_here, lanes weight) {
            const auto g = d_out_here * weight;
            if constexpr (centred) return scale * fma(-y_of(value), slope, g - mean);
            else return scale * fma(-y_of(value), slope, g);
        };
        T* const to = wanted_.x.row(b, h, i);
        simd::for_each_register<T>(s.channels, [&](index_t c, auto load, auto store) {
            const auto result = gradient(load(x + c), load(d_out + c), weight_ ? load(weight_ + c) : lanes(1));
            if constexpr (streaming) c + lanes::size <= s.channels ? result.store_streaming(to + c) : store(result, to + c);
            else store(result, to + c);
        });
    }

    tensor_view<const T> x_, d_out_;
    norm_gradients<T> wanted_;
    const T* weight_;
    double eps_;
};

} // namespace attn::detail
