#include "linear_bounds.hpp"

#include <cmath>

namespace attn::fuzz {

namespace {

/// |f(x)|, and f(x).
tensor<double> features(const tensor_view<const double>& x, const std::function<double(double)>& f) {
    const auto [batch, heads, n, d] = x.shape();
    tensor<double> result(x.shape());
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i)
                for (index_t c = 0; c < d; ++c) result(b, h, i, c) = f ? f(x(b, h, i, c)) : x(b, h, i, c);
    return result;
}

} // namespace

void linear_bounds(const inputs<double>& in, const tensor_view<double>& bounds, const linear_terms& t) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto q = features(in.queries, t.feature), k = features(in.keys, t.feature);
    const auto relative = t.unit * static_cast<double>(m + d_k + 16) + 2 * t.feature_error;
    std::vector<double> sums(static_cast<std::size_t>(d_v)), magnitudes(sums.size());
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / kv_heads);
            const auto sees = t.sees(b, h);
            for (index_t i = 0; i < n; ++i) {
                std::ranges::fill(sums, 0);
                std::ranges::fill(magnitudes, 0);
                double weights = 0, weight_magnitudes = 0;
                for (index_t j = 0; j < m; ++j) {
                    if (!sees(in.positions.first_query[b] + i, in.positions.first_key[b] + j)) continue;
                    double weight = 0, magnitude = 0;
                    for (index_t c = 0; c < d_k; ++c) {
                        weight += q(b, h, i, c) * k(b, g, j, c);
                        magnitude += std::abs(q(b, h, i, c) * k(b, g, j, c));
                    }
                    weights += weight;
                    weight_magnitudes += magnitude;
                    for (index_t c = 0; c < d_v; ++c) {
                        sums[static_cast<std::size_t>(c)] += weight * in.values(b, g, j, c);
                        magnitudes[static_cast<std::size_t>(c)] += magnitude * std::abs(in.values(b, g, j, c));
                    }
                }
                for (index_t c = 0; c < d_v; ++c) {
                    const auto error = relative * magnitudes[static_cast<std::size_t>(c)] + t.least;
                    if (!t.normalise) {
                        bounds(b, h, i, c) = std::abs(t.scale) * error * (1 + 4 * t.unit) +
                                             4 * t.unit * std::abs(t.scale * sums[static_cast<std::size_t>(c)]);
                        continue;
                    }
                    // N / D: (dN + |out| dD) / (D - dD), and a rounding or two.
                    const auto d = weights + t.eps, of_d = relative * weight_magnitudes + 4 * t.unit * d + t.least;
                    const auto out = std::abs(sums[static_cast<std::size_t>(c)] / d);
                    bounds(b, h, i, c) = weight_magnitudes == 0 ? 0
                                         : of_d < d             ? (error + out * of_d) / (d - of_d) + 4 * t.unit * out
                                                                : std::numeric_limits<double>::infinity();
                }
            }
        }
}

void add_convolution_bounds(const tensor_view<const double>& x, const tensor_view<const double>& result, const tensor_view<double>& bounds,
                            const reference::grid& grid, const tensor_view<const double>& weights, std::span<const double> bias,
                            std::span<const index_t> present, double unit) {
    const auto magnitudes_of = [](const tensor_view<const double>& from) { return features(from, [](double y) { return std::abs(y); }); };
    const auto from = magnitudes_of(x), by = magnitudes_of(weights);
    std::vector<double> start(bias.begin(), bias.end());
    for (auto& y : start) y = std::abs(y);
    tensor<double> sums(bounds.shape());
    reference::add_depthwise_convolution<double, double>(from, sums.view(), grid, by, start, present);
    const auto taps = static_cast<double>(weights.shape().tokens * weights.shape().channels);
    const auto [batch, heads, n, d] = bounds.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i)
                for (index_t c = 0; c < d; ++c)
                    bounds(b, h, i, c) += unit * ((taps + 4) * sums(b, h, i, c) + 4 * (sums(b, h, i, c) + std::abs(result(b, h, i, c))));
}

} // namespace attn::fuzz
