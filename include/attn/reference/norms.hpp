// The definitions of the norms: the printed formulas, one number at a time.
#pragma once

#include "../core/tensor_view.hpp"
#include "number.hpp"

#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// Everything in T: with double the reference, with float the textbook that kernels are judged against. x and out are (batch, heads,
/// tokens, channels), of any strides; parameters are (channels), or empty. All is taken as checked.
namespace detail {

template <class F>
void for_each_row(const shape& s, const F& f) {
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i) f(b, h, i);
}
template <class T>
T entry(std::span<const T> parameter, index_t c, T otherwise) {
    return parameter.empty() ? otherwise : parameter[static_cast<std::size_t>(c)];
}

} // namespace detail

/// out = (x - mean) / sqrt(variance + eps) * weight + bias over the channels of a row; biased variance. Ba, Kiros and Hinton 2016.
template <class T>
void layer_norm(const tensor_view<const T>& x, const tensor_view<T>& out, std::span<const T> weight = {}, std::span<const T> bias = {},
                T eps = T(1e-5)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        T mean = 0, variance = 0;
        for (index_t c = 0; c < channels; ++c) mean += x(b, h, i, c);
        mean /= static_cast<T>(channels);
        for (index_t c = 0; c < channels; ++c) variance += (x(b, h, i, c) - mean) * (x(b, h, i, c) - mean);
        variance /= static_cast<T>(channels);
        for (index_t c = 0; c < channels; ++c)
            out(b, h, i, c) = (x(b, h, i, c) - mean) / sqrt(variance + eps) * detail::entry(weight, c, T{1}) + detail::entry(bias, c, T{0});
    });
}

/// out = x / sqrt(mean(x^2) + eps) * weight over the channels of a row. Zhang and Sennrich 2019.
template <class T>
void rms_norm(const tensor_view<const T>& x, const tensor_view<T>& out, std::span<const T> weight = {}, T eps = T(1e-5)) {
    const auto channels = x.shape().channels;
    detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
        T squares = 0;
        for (index_t c = 0; c < channels; ++c) squares += x(b, h, i, c) * x(b, h, i, c);
        const T root = sqrt(squares / static_cast<T>(channels) + eps);
        for (index_t c = 0; c < channels; ++c) out(b, h, i, c) = x(b, h, i, c) / root * detail::entry(weight, c, T{1});
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
                if (!mask.data() || mask(b, mask.shape().heads == 1 ? 0 : h, i, 0)) f(b, h, i);
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
        const bool hidden = mask.data() && !mask(b, mask.shape().heads == 1 ? 0 : h, i, 0);
        for (index_t c = 0; c < x.shape().channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const T value = x(b, h, i, c);
            const T normal = (value - mean[at]) / sqrt(variance[at] + eps) * detail::entry(weight, c, T{1}) + detail::entry(bias, c, T{0});
            out(b, h, i, c) = (hidden ? value : normal) + eta * value;
        }
    });
}

} // namespace attn::reference
