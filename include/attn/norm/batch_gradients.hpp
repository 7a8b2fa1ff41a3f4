// The gradients of a batch_norm, in training or in inference, plus a multiple of its input.
#pragma once

#include "channel_map.hpp"
#include "row_gradients.hpp"
#include "token_moments.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// What reaches a batch_norm plus eta times its input, and how its gradients are taken.
template <Scalar T>
struct batch_gradient_call {
    const tensor_view<const T>&x, &d_out;
    const rep_norm_gradients<T>& wanted;
    const token_mask& mask;
    double eta, share = 1;   ///< what is given counts `share` times,
    double kept = 0;         ///< and wanted.x keeps so much of what it holds
    bool is_running = false; ///< the statistics are the norm's own, and constants: all tokens count
};

/// The gradients of a training step. With the N tokens that count, y = (x - mean) / sqrt(variance + eps) and g = d_out,
///     d bias = sum g,      d weight = sum g y,      d eta = sum over all tokens and channels of g x
///     d x = weight / sqrt(variance + eps) (g - d bias / N - y d weight / N) + eta g;      of a token that does not count (1 + eta) g
/// With running statistics d x = weight / sqrt(variance + eps) g + eta g.
/// Rows are summed in parts that depend on their number only, and parts one after the other: so threads change no bit.
template <Scalar T>
class batch_gradients {
public:
    static std::size_t workspace_bytes(const shape& x, index_t concurrency) { return bytes_for<layout>(x, concurrency); }

    /// norm: a batch_norm.
    void operator()(const auto& norm, const batch_gradient_call<T>& call, const execution& run) const {
        const auto& s = call.x.shape();
        if (s.channels == 0) {
            for (auto& eta : call.wanted.eta) eta = 0;
            return;
        }
        scratch memory(run.workspace().bytes().data());
        const layout own(memory, s, run.concurrency());
        const auto seen = call.is_running ? moments_view{} : own.statistics(call.x, call.mask, run);
        const auto running = [&](std::span<const double> statistic, index_t c) { return statistic[static_cast<std::size_t>(c)]; };
        const auto mean = [&](index_t c) { return call.is_running ? running(norm.mean, c) : seen.mean[c]; };
        const auto deviation = [&](index_t c) {
            return std::sqrt((call.is_running ? running(norm.variance, c) : seen.variance(c, false)) + norm.eps);
        };
        own.normal.set(s.channels, 1, [&](index_t c) { return channel_map{mean(c), 1 / deviation(c), 0}; });

        const row_parts parts(s);
        run.for_each(parts.count, [&](index_t part, index_t) {
            std::fill_n(own.of_part(part, 0), 3 * own.stride, T{0});
            parts.for_each_row(part, [&](index_t r) { add_row(call, own, part, r); });
        });
        double of_eta = 0;
        for (index_t c = 0; c < s.channels; ++c) {
            double sums[3] = {0, 0, 0};
            for (index_t part = 0; part < parts.count; ++part)
                for (index_t which = 0; which < 3; ++which) sums[which] += static_cast<double>(own.of_part(part, which)[c]);
            const auto at = static_cast<std::size_t>(c);
            const auto weight = norm.weight.empty() ? 1 : static_cast<double>(norm.weight[at]),
                       count = static_cast<double>(std::max<index_t>(1, seen.count));
            own.slope[c] = static_cast<T>(weight / deviation(c));
            own.mean_bias[c] = static_cast<T>(sums[0] / count);
            own.mean_weight[c] = static_cast<T>(sums[1] / count);
            if (!call.wanted.bias.empty()) call.wanted.bias[at] = static_cast<T>(call.share * sums[0]);
            if (!call.wanted.weight.empty()) call.wanted.weight[at] = static_cast<T>(call.share * sums[1]);
            of_eta += sums[2];
        }
        for (auto& eta : call.wanted.eta) eta = static_cast<T>(call.share * of_eta);
        if (!call.wanted.x.data()) return;
        run.for_each(parts.count, [&](index_t part, index_t) { parts.for_each_row(part, [&](index_t r) { write_row(call, own, r); }); });
    }

private:
    using lanes = simd::lanes<T>;

    struct layout {
        token_statistics<T> statistics;
        channel_maps<T> normal;             ///< y = (x - centre) scale + offset
        T *slope, *mean_bias, *mean_weight; ///< weight / sqrt(variance + eps), d bias / N, d weight / N
        T* sums;                            ///< [part][g, g y, g x][channels]
        index_t stride;

        layout(scratch& memory, const shape& x, index_t concurrency)
            : statistics(token_statistics<T>::in(memory, x, concurrency)), normal(channel_maps<T>::in(memory, x.channels)),
              slope(memory.take<T>(x.channels)), mean_bias(memory.take<T>(x.channels)), mean_weight(memory.take<T>(x.channels)),
              sums(memory.take<T>(3 * row_parts(x).count, x.channels)), stride(x.channels) {}
        T* of_part(index_t part, index_t which) const { return sums + (3 * part + which) * stride; }
    };
    static void add_row(const batch_gradient_call<T>& call, const layout& own, index_t part, index_t row) {
        const auto [b, h, i] = row_place(call.x.shape(), row);
        const T *const x = call.x.row(b, h, i), *const d_out = call.d_out.row(b, h, i);
        T *const of_bias = own.of_part(part, 0), *const of_weight = own.of_part(part, 1), *const of_eta = own.of_part(part, 2);
        const bool is_counted = counts(call.mask, b, h, i);
        simd::for_each_register<T>(call.x.shape().channels, [&](index_t c, const auto& load, const auto& store) {
            const auto value = load(x + c), g = load(d_out + c);
            store(fma(g, value, load(of_eta + c)), of_eta + c);
            if (!is_counted) return;
            store(load(of_bias + c) + g, of_bias + c);
            store(fma(g, normal(own, value, c, load), load(of_weight + c)), of_weight + c);
        });
    }
    static void write_row(const batch_gradient_call<T>& call, const layout& own, index_t row) {
        const auto [b, h, i] = row_place(call.x.shape(), row);
        const T *const x = call.x.row(b, h, i), *const d_out = call.d_out.row(b, h, i);
        T* const to = call.wanted.x.row(b, h, i);
        const lanes share(static_cast<T>(call.share)), kept(static_cast<T>(call.kept)), eta(static_cast<T>(call.eta));
        const bool is_counted = counts(call.mask, b, h, i);
        simd::for_each_register<T>(call.x.shape().channels, [&](index_t c, const auto& load, const auto& store) {
            const auto g = load(d_out + c);
            auto sum = eta * g;
            if (call.is_running) {
                sum = fma(load(own.slope + c), g, sum);
            } else if (is_counted) {
                const auto y = normal(own, load(x + c), c, load);
                sum = fma(load(own.slope + c), fma(-y, load(own.mean_weight + c), g - load(own.mean_bias + c)), sum);
            } else {
                sum += g;
            }
            sum = share * sum;
            if (call.kept != 0) sum = fma(kept, load(to + c), sum);
            store(sum, to + c);
        });
    }
    [[gnu::always_inline]] static lanes normal(const layout& own, lanes x, index_t c, const auto& load) {
        return fma(x - load(own.normal.centre + c), load(own.normal.scale + c), load(own.normal.offset + c));
    }
};

} // namespace detail

} // namespace attn
