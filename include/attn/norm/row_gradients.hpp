// The gradients of norms of rows: of each row by itself, and of weight and bias over all rows.
#pragma once

#include "backward.hpp"
#include "row_operation.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// The gradients of a norm of rows. With y = (x - centre) scale + offset, what a row is before weight and bias, and g = d_out * weight:
///     d x = scale (g - mean(g) - y mean(g y)),      d weight = sum over rows of d_out y,      d bias = sum over rows of d_out
/// without mean(g) where rows are not centred. Of a unit row mean(g y) is a sum, and of one whose norm is the least one it is 0. Rows are
/// summed in parts that depend on their number only, and parts one after the other: so threads change no bit.
template <row_norm kind, Scalar T>
class row_gradients {
    static constexpr bool centred = kind == row_norm::centred, is_unit = kind == row_norm::unit;

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
        const auto channels = kernel::whole_registers<T>(s.channels);
        if (s.channels == 0) return;
        const auto add_parts = [&](auto streaming) {
            run.for_each(parts.count, [&](index_t part, index_t) {
                T *const of_weight = own.sums + 2 * part * channels, *const of_bias = of_weight + channels;
                std::fill_n(of_weight, 2 * channels, T{0});
                parts.for_each_row(part, [&](index_t r) { add_row<streaming()>(row_place(s, r), of_weight, of_bias); });
                if constexpr (streaming()) simd::finish_streaming();
            });
        };
        with_condition(wanted_.x.data() && worth_streaming<T>(x_, wanted_.x), add_parts);
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

        layout(scratch& memory, const shape& x) : sums(memory.take<T>(2 * row_parts(x).count, kernel::whole_registers<T>(x.channels))) {}
    };

    template <bool streaming>
    void add_row(const row_place& at, T* of_weight, T* of_bias) const {
        const auto& s = x_.shape();
        const auto [b, h, i] = at;
        const T *const x = x_.row(b, h, i), *const d_out = d_out_.row(b, h, i);
        const row_operation<kind, T> op{{s.channels}};
        const auto map = map_of(op, x, op.sums_of(x, x[0]), eps_);
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

        const auto count = is_unit ? T{1} : static_cast<T>(s.channels);
        const bool is_least = is_unit && map.scale == static_cast<T>(1 / eps_);
        const lanes mean(total.total() / count), slope(is_least ? T{0} : products.total() / count);
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
