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
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i) {
                const auto g = h / (heads / kv_heads);
                std::ranges::fill(sums, 0);
                std::ranges::fill(magnitudes, 0);
                double weights = 0, weight_magnitudes = 0;
                for (index_t j = 0; j < m; ++j) {
                    if (!t.sees(b, h, in.positions.first_query[b] + i, in.positions.first_key[b] + j)) continue;
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

void linear_gradient_bounds(const inputs<double>& in, const tensor_view<const double>& given, const tensor_view<const double>& exact,
                            const tensor_view<const double>& errors, const testing::wanted_gradients<double>& bounds, const linear_terms& t) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto group = heads / std::max<index_t>(1, kv_heads);
    const auto q = features(in.queries, t.feature), k = features(in.keys, t.feature);
    for (const auto& view : {bounds.queries, bounds.keys, bounds.values}) std::fill_n(view.data(), view.shape().size(), 0.0);
    const auto of_weight = t.unit * static_cast<double>(m + d_k + 16) + 2 * t.feature_error;
    const auto of_sums = t.unit * static_cast<double>(m + n * group + d_k + d_v + 16) + 2 * t.feature_error;
    std::vector<double> weights(static_cast<std::size_t>(m)), magnitudes(weights);
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i) {
                const auto g = h / group;
                const auto sees = [&](index_t j) { return t.sees(b, h, in.positions.first_query[b] + i, in.positions.first_key[b] + j); };
                double sum = t.eps, sum_of_magnitudes = 0;
                for (index_t j = 0; j < m; ++j) {
                    const auto at_j = static_cast<std::size_t>(j);
                    weights[at_j] = magnitudes[at_j] = 0;
                    if (!sees(j)) continue;
                    for (index_t c = 0; c < d_k; ++c) {
                        weights[at_j] += q(b, h, i, c) * k(b, g, j, c);
                        magnitudes[at_j] += std::abs(q(b, h, i, c) * k(b, g, j, c));
                    }
                    sum += weights[at_j];
                    sum_of_magnitudes += magnitudes[at_j];
                }
                const auto of_sum = of_weight * sum_of_magnitudes + 4 * t.unit * sum + t.least;
                const auto factor = std::abs(t.normalise ? 1 / sum : t.scale);
                const auto of_factor = !t.normalise ? 4 * t.unit : of_sum < sum ? of_sum / (sum - of_sum) + 4 * t.unit : std::numeric_limits<double>::infinity();
                double shift = 0, of_shift = 0; // dO_i . out_i, what is added up in it, and its error
                for (index_t c = 0; t.normalise && c < d_v; ++c) {
                    shift += std::abs(given(b, h, i, c) * exact(b, h, i, c));
                    of_shift += std::abs(given(b, h, i, c)) * errors(b, h, i, c);
                }
                for (index_t j = 0; j < m; ++j) {
                    if (!sees(j)) continue;
                    const auto at_j = static_cast<std::size_t>(j);
                    double product = 0;
                    for (index_t c = 0; c < d_v; ++c) product += std::abs(given(b, h, i, c) * in.values(b, g, j, c));
                    const auto size = factor * (product + shift);
                    const auto error = (of_sums + of_factor) * size + factor * (1 + of_factor) * of_shift + t.least;
                    for (index_t c = 0; c < d_k; ++c) {
                        bounds.queries(b, h, i, c) += error * std::abs(k(b, g, j, c)) + t.least;
                        bounds.keys(b, g, j, c) += error * std::abs(q(b, h, i, c)) + t.least;
                    }
                    for (index_t c = 0; c < d_v; ++c)
                        bounds.values(b, g, j, c) += (of_sums + of_factor) * factor * magnitudes[at_j] * std::abs(given(b, h, i, c)) + t.least;
                }
            }
    // What the slope makes of them; its own rounding is that of a feature.
    const auto times_slope = [&](const tensor_view<double>& of, const tensor_view<const double>& x) {
        const auto& s = x.shape();
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) of(b, h, i, c) *= 2 * std::abs(t.slope(x(b, h, i, c)));
    };
    times_slope(bounds.queries, in.queries);
    times_slope(bounds.keys, in.keys);
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
