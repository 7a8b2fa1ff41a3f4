// The gradient of layer_norm and rms_norm: of each row by itself, and of weight and bias over all rows.
#pragma once

#include "backward.hpp"
#include "row_moments.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

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
        const auto rows = rows_of(s), parts = parts_of(s), channels = whole(s.channels);
        if (s.channels == 0) return;
        const auto add_parts = [&](auto streaming) {
            run.for_each(parts, [&](index_t part, index_t) {
                T *const of_weight = own.sums + 2 * part * channels, *const of_bias = of_weight + channels;
                std::fill_n(of_weight, 2 * channels, T{0});
                for (auto r = rows * part / parts; r < rows * (part + 1) / parts; ++r) add_row<streaming()>(r, of_weight, of_bias);
                if constexpr (streaming()) simd::finish_streaming();
            });
        };
        with_conditions(add_parts, wanted_.x.data() && worth_streaming<T>(x_, wanted_.x));
        for (const bool of_bias : {false, true}) {
            const auto to = of_bias ? wanted_.bias : wanted_.weight;
            for (index_t c = 0; c < std::ssize(to); ++c) {
                T sum = 0;
                for (index_t part = 0; part < parts; ++part) sum += own.sums[(2 * part + of_bias) * channels + c];
                to[static_cast<std::size_t>(c)] = sum;
            }
        }
    }

private:
    struct layout {
        T* sums; ///< [part][weight, bias][channels in whole registers]

        layout(scratch& memory, const shape& x) : sums(memory.take<T>(2 * parts_of(x), whole(x.channels))) {}
    };

    static index_t whole(index_t channels) { return (channels + lanes::size - 1) / lanes::size * lanes::size; }
    static index_t rows_of(const shape& x) { return x.batch * x.heads * x.tokens; }
    /// Enough for many threads, few enough to be summed at the end.
    static index_t parts_of(const shape& x) {
        constexpr index_t most = 64, fewest_rows = 16;
        return std::clamp<index_t>(rows_of(x) / fewest_rows, 1, most);
    }

    row_map<T> map_of(const T* row) const {
        const row_operation<centred, false, false, false, T> op{x_.shape().channels, nullptr, nullptr};
        const auto sums = op.template pass<true, false>(row, row[0], nullptr, nullptr, {});
        if constexpr (centred) return centred_map(op, row, sums, eps_);
        else return root_mean_square_map(op, row, sums.squares, eps_);
    }
    template <bool streaming>
    void add_row(index_t number, T* of_weight, T* of_bias) const {
        const auto& s = x_.shape();
        const auto b = number / (s.heads * s.tokens), h = number / s.tokens % s.heads, i = number % s.tokens;
        const T *const x = x_.row(b, h, i), *const d_out = d_out_.row(b, h, i);
        const auto map = map_of(x);
        const lanes centre(map.centre), scale(map.scale), offset(map.offset);
        const auto y_of = [&](lanes value) {
            if constexpr (centred) return fma(value - centre, scale, offset);
            else return value * scale;
        };
        constexpr int chains = 4, size = lanes::size; // which hide the latency of adding
        lanes total[chains], products[chains];
        simd::unroll<chains>([&](auto k) { total[k] = products[k] = lanes(0); });
        const auto step = [&](auto k, index_t c, lanes value, lanes d_out_here, lanes weight) __attribute__((always_inline)) {
            const auto y = y_of(value), g = d_out_here * weight;
            if constexpr (centred) total[k] += g;
            products[k] = fma(g, y, products[k]);
            fma(d_out_here, y, lanes::load(of_weight + c)).store(of_weight + c);
            (lanes::load(of_bias + c) + d_out_here).store(of_bias + c);
        };
        const auto weight_at = [&](index_t c) { return weight_ ? lanes::load(weight_ + c) : lanes(1); };
        index_t c = 0;
        for (; c + chains * size <= s.channels; c += chains * size)
            simd::unroll<chains>([&](auto k) {
                const auto at = c + k * size;
                step(k, at, lanes::load(x + at), lanes::load(d_out + at), weight_at(at));
            });
        for (; c + size <= s.channels; c += size)
            step(std::integral_constant<int, 0>{}, c, lanes::load(x + c), lanes::load(d_out + c), weight_at(c));
        const auto left = s.channels - c;
        if (left > 0) { // d_out is 0 behind the row, and x is what it is elsewhere in it: a number
            const auto in_row = simd::lane_bits::first(left);
            const auto weight = weight_ ? lanes::load_first(weight_ + c, left) : lanes(1);
            step(std::integral_constant<int, 1>{}, c, select(in_row, lanes::load_first(x + c, left), centre),
                 lanes::load_first(d_out + c, left), weight);
        }
        if (!wanted_.x.data()) return;

        const auto count = static_cast<T>(s.channels);
        const lanes mean(sum((total[0] + total[1]) + (total[2] + total[3])) / count),
            slope(sum((products[0] + products[1]) + (products[2] + products[3])) / count);
        const auto gradient = [&](lanes value, lanes d_out_here, lanes weight) {
            const auto g = d_out_here * weight;
            if constexpr (centred) return scale * fma(-y_of(value), slope, g - mean);
            else return scale * fma(-y_of(value), slope, g);
        };
        T* const to = wanted_.x.row(b, h, i);
        for (c = 0; c + size <= s.channels; c += size) {
            const auto result = gradient(lanes::load(x + c), lanes::load(d_out + c), weight_at(c));
            if constexpr (streaming) result.store_streaming(to + c);
            else result.store(to + c);
        }
        if (left > 0)
            gradient(lanes::load_first(x + c, left), lanes::load_first(d_out + c, left),
                     weight_ ? lanes::load_first(weight_ + c, left) : lanes(1))
                .store_first(to + c, left);
    }

    tensor_view<const T> x_, d_out_;
    norm_gradients<T> wanted_;
    const T* weight_;
    double eps_;
};

} // namespace attn::detail
