// The definitions of the norms and their gradients: the printed formulas, one number at a time.
#pragma once

#include "../core/tensor_view.hpp"
#include "number.hpp"

#include <algorithm>
#include <numbers>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// Everything in T: with double the reference, with float the textbook that kernels are judged against. x and out are (batch, heads,
/// tokens, channels), of any strides; parameters are (channels), or empty. All is taken as checked.
namespace detail {

using attn::detail::for_each_row;
template <class T>
T entry(std::span<const T> parameter, index_t c, T otherwise) {
    return parameter.empty() ? otherwise : parameter[static_cast<std::size_t>(c)];
}
/// The sum of the squares of a row.
template <class T>
T squares_of(const tensor_view<const T>& x, index_t b, index_t h, index_t i) {
    return sum_over<T>(x.shape().channels, [&](index_t c) { return x(b, h, i, c) * x(b, h, i, c); });
}
inline bool counts(const tensor_view<const bool>& mask, index_t b, index_t h, index_t i) {
    return !mask.data() || mask(b, mask.shape().heads == 1 ? 0 : h, i, 0);
}

} // namespace detail

/// out = (x - mean) / sqrt(variance + eps) * weight + bias over the channels of a row; biased variance. Ba, Kiros and Hinton 2016.
template <class T>
void layer_norm(const tensor_view<const T>& x, const tensor_view<T>& out, std::span<const T> weight = {}, std::span<const T> bias = {},
                T eps = T(1e-5)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        const T mean = detail::sum_over<T>(channels, [&](index_t c) { return x(b, h, i, c); }) / static_cast<T>(channels);
        const auto apart = [&](index_t c) { return x(b, h, i, c) - mean; };
        const T variance = detail::sum_over<T>(channels, [&](index_t c) { return apart(c) * apart(c); }) / static_cast<T>(channels);
        for (index_t c = 0; c < channels; ++c)
            out(b, h, i, c) = apart(c) / sqrt(variance + eps) * detail::entry(weight, c, T{1}) + detail::entry(bias, c, T{0});
    });
}

/// out = x / sqrt(mean(x^2) + eps) * weight over the channels of a row. Zhang and Sennrich 2019.
template <class T>
void rms_norm(const tensor_view<const T>& x, const tensor_view<T>& out, std::span<const T> weight = {}, T eps = T(1e-5)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        const T root = sqrt(detail::squares_of(x, b, h, i) / static_cast<T>(channels) + eps);
        for (index_t c = 0; c < channels; ++c) out(b, h, i, c) = x(b, h, i, c) / root * detail::entry(weight, c, T{1});
    });
}

/// out = x / max(|x|, eps), |x| = sqrt(sum(x^2)) over the channels of a row.
template <class T>
void unit_norm(const tensor_view<const T>& x, const tensor_view<T>& out, T eps = T(1e-12)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        const T length = max(sqrt(detail::squares_of(x, b, h, i)), eps);
        for (index_t c = 0; c < channels; ++c) out(b, h, i, c) = x(b, h, i, c) / length;
    });
}

/// What takes the place of a norm: tanh (Zhu et al. 2025), erf (Chen et al. 2025).
enum class curve { tanh, erf };

/// out = weight f(alpha x + shift) + bias of each number, f the curve.
template <class T>
void dynamic_curve(curve f, const tensor_view<const T>& x, const tensor_view<T>& out, T alpha, T shift, std::span<const T> weight = {},
                   std::span<const T> bias = {}) {
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        const T u = alpha * x(b, h, i, c) + shift, y = f == curve::tanh ? tanh(u) : erf(u);
        out(b, h, i, c) = detail::entry(weight, c, T{1}) * y + detail::entry(bias, c, T{0});
    });
}

/// Mean and biased variance of each channel over the tokens that count, and their number. No mask: all count.
template <class T>
struct channel_statistics {
    std::vector<T> mean, variance;
    index_t tokens = 0;

    /// The statistics of the tokens of x that the mask counts.
    explicit channel_statistics(const tensor_view<const T>& x, const tensor_view<const bool>& mask = {})
        : mean(static_cast<std::size_t>(x.shape().channels)), variance(mean.size()) {
        const auto counted = [&](const auto& f) {
            detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
                if (detail::counts(mask, b, h, i)) f(b, h, i);
            });
        };
        counted([&](index_t, index_t, index_t) { ++tokens; });
        for (std::size_t c = 0; c < mean.size(); ++c) {
            const auto channel = static_cast<index_t>(c);
            counted([&](index_t b, index_t h, index_t i) { mean[c] += x(b, h, i, channel); });
            mean[c] /= static_cast<T>(tokens);
            counted(
                [&](index_t b, index_t h, index_t i) { variance[c] += (x(b, h, i, channel) - mean[c]) * (x(b, h, i, channel) - mean[c]); });
            variance[c] /= static_cast<T>(tokens);
        }
    }
    /// The variance of what the tokens are a sample of.
    T unbiased_variance(std::size_t c) const { return variance[c] * static_cast<T>(tokens) / static_cast<T>(tokens - 1); }
};

/// out = (x - mean) / sqrt(variance + eps) * weight + bias + eta x, for each channel: with eta = 0 BatchNorm (Ioffe and Szegedy 2015), else
/// RepBN (Guo et al. 2024). Rows that the mask leaves out give x + eta x, and for BatchNorm x.
template <class T>
void rep_batch_norm(const tensor_view<const T>& x, const tensor_view<T>& out, std::span<const T> mean, std::span<const T> variance,
                    std::span<const T> weight = {}, std::span<const T> bias = {}, T eta = 0, T eps = T(1e-5),
                    const tensor_view<const bool>& mask = {}) {
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        for (index_t c = 0; c < x.shape().channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const T value = x(b, h, i, c);
            const T normal = (value - mean[at]) / sqrt(variance[at] + eps) * detail::entry(weight, c, T{1}) + detail::entry(bias, c, T{0});
            out(b, h, i, c) = (detail::counts(mask, b, h, i) ? normal : value) + eta * value;
        }
    });
}

/// The gradients of a loss by what a norm of rows read, everything in T: x (batch, heads, tokens, channels), weight and bias (channels)
/// each.
template <class T>
struct row_norm_gradients {
    tensor_view<T> x;
    std::span<T> weight; ///< or empty
    std::span<T> bias;   ///< or empty
};

/// The gradients of layer_norm, or with `centred` false of rms_norm. With y = (x - mean) / sqrt(variance + eps), or x / sqrt(mean(x^2) +
/// eps), r that denominator, dO the gradient given, and g = dO weight:
///     dx = (g - mean(g) - y mean(g y)) / r,      dweight = sum over rows of dO y,      dbias = sum over rows of dO
/// means over the channels of a row, and without mean(g) for rms_norm.
template <class T>
void row_norm_backward(bool centred, const tensor_view<const T>& x, const tensor_view<const T>& d_out, const row_norm_gradients<T>& wanted,
                       std::span<const T> weight = {}, T eps = T(1e-5)) {
    const auto channels = x.shape().channels;
    const auto count = static_cast<T>(channels);
    std::vector<T> y(static_cast<std::size_t>(channels)), g(y.size());
    std::ranges::fill(wanted.weight, T{0});
    std::ranges::fill(wanted.bias, T{0});
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        T mean = 0, squares = 0;
        for (index_t c = 0; centred && c < channels; ++c) mean += x(b, h, i, c) / count;
        for (index_t c = 0; c < channels; ++c) squares += (x(b, h, i, c) - mean) * (x(b, h, i, c) - mean) / count;
        const T root = sqrt(squares + eps);
        T of_g = 0, of_product = 0;
        for (index_t c = 0; c < channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            y[at] = (x(b, h, i, c) - mean) / root;
            g[at] = d_out(b, h, i, c) * detail::entry(weight, c, T{1});
            if (centred) of_g += g[at] / count;
            of_product += g[at] * y[at] / count;
            if (!wanted.weight.empty()) wanted.weight[at] += d_out(b, h, i, c) * y[at];
            if (!wanted.bias.empty()) wanted.bias[at] += d_out(b, h, i, c);
        }
        for (index_t c = 0; c < channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            wanted.x(b, h, i, c) = (g[at] - of_g - y[at] * of_product) / root;
        }
    });
}

/// The gradient of unit_norm. With y = x / max(|x|, eps) and dO the gradient given:
///     dx = (dO - y sum(dO y)) / |x|,      and of a row shorter than eps dO / eps
template <class T>
void unit_norm_backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const tensor_view<T>& wanted, T eps = T(1e-12)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        const T length = max(sqrt(detail::squares_of(x, b, h, i)), eps);
        T product = detail::sum_over<T>(channels, [&](index_t c) { return d_out(b, h, i, c) * (x(b, h, i, c) / length); });
        if (!(length > eps)) product = 0;
        for (index_t c = 0; c < channels; ++c) wanted(b, h, i, c) = (d_out(b, h, i, c) - x(b, h, i, c) / length * product) / length;
    });
}

/// The gradients of a loss by what a dynamic_curve read.
template <class T>
struct dynamic_curve_gradients : row_norm_gradients<T> {
    T* alpha = nullptr; ///< or null
    T* shift = nullptr; ///< or null
};

/// The gradients of dynamic_curve. With u = alpha x + shift, dO the gradient given and s = dO weight f'(u):
///     dx = alpha s,   dweight = sum dO f(u),   dbias = sum dO,      over rows
///     dalpha = sum s x,   dshift = sum s,      over all numbers
template <class T>
void dynamic_curve_backward(curve f, const tensor_view<const T>& x, const tensor_view<const T>& d_out,
                            const dynamic_curve_gradients<T>& wanted, T alpha, T shift, std::span<const T> weight = {}) {
    for (const auto sums : {wanted.weight, wanted.bias}) std::ranges::fill(sums, T{0});
    for (T* const sum : {wanted.alpha, wanted.shift})
        if (sum) *sum = 0;
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        const T value = x(b, h, i, c), u = alpha * value + shift, given = d_out(b, h, i, c), y = f == curve::tanh ? tanh(u) : erf(u);
        const T slope = f == curve::tanh ? T{1} - y * y : static_cast<T>(2 * std::numbers::inv_sqrtpi) * exp(-(u * u));
        const T s = given * detail::entry(weight, c, T{1}) * slope;
        if (!wanted.weight.empty()) wanted.weight[static_cast<std::size_t>(c)] += given * y;
        if (!wanted.bias.empty()) wanted.bias[static_cast<std::size_t>(c)] += given;
        if (wanted.alpha) *wanted.alpha += s * value;
        if (wanted.shift) *wanted.shift += s;
        wanted.x(b, h, i, c) = alpha * s;
    });
}

/// The gradients of a loss by what a training step of a RepBN, or with eta = 0 of a BatchNorm, read.
template <class T>
struct rep_norm_gradients {
    tensor_view<T> x;
    std::span<T> weight; ///< or empty
    std::span<T> bias;   ///< or empty
    T* eta = nullptr;    ///< or null
};

/// The gradients of rep_batch_norm with the statistics of the batch. With the N tokens that the mask counts, y = (x - mean) / r, r =
/// sqrt(variance + eps), and dO the gradient given, for each channel
///     dbias = sum dO,      dweight = sum dO y,      deta = sum over all tokens and channels of dO x
///     dx = weight / r (dO - dbias / N - y dweight / N) + eta dO;      of a token that does not count dO + eta dO
/// With the mean and variance that are given, of inference: dx = weight / r dO + eta dO.
template <class T>
void rep_batch_norm_backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const rep_norm_gradients<T>& wanted,
                             std::span<const T> weight = {}, T eta = 0, T eps = T(1e-5), const tensor_view<const bool>& mask = {},
                             std::span<const T> mean = {}, std::span<const T> variance = {}) {
    const channel_statistics<T> seen(x, mask);
    const auto tokens = static_cast<T>(seen.tokens);
    if (wanted.eta) *wanted.eta = 0;
    for (index_t c = 0; c < x.shape().channels; ++c) {
        const auto at = static_cast<std::size_t>(c);
        const T root = sqrt((mean.empty() ? seen.variance : variance)[at] + eps), centre = (mean.empty() ? seen.mean : mean)[at];
        const auto y = [&](index_t b, index_t h, index_t i) { return (x(b, h, i, c) - centre) / root; };
        T of_bias = 0, of_weight = 0;
        detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
            if (wanted.eta) *wanted.eta += d_out(b, h, i, c) * x(b, h, i, c);
            if (!detail::counts(mask, b, h, i)) return;
            of_bias += d_out(b, h, i, c);
            of_weight += d_out(b, h, i, c) * y(b, h, i);
        });
        if (!wanted.bias.empty()) wanted.bias[at] = of_bias;
        if (!wanted.weight.empty()) wanted.weight[at] = of_weight;
        detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
            const T g = d_out(b, h, i, c);
            const T by_statistics = mean.empty() ? of_bias / tokens + y(b, h, i) * of_weight / tokens : T{0};
            const T normal = detail::entry(weight, c, T{1}) / root * (g - by_statistics);
            wanted.x(b, h, i, c) = (detail::counts(mask, b, h, i) ? normal : g) + eta * g;
        });
    }
}

} // namespace attn::reference
