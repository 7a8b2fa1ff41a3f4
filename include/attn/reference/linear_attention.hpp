// The definition of linear attention: its n x m weights, one query at a time.
#pragma once

#include "../core/inputs.hpp"
#include "../core/tensor.hpp"
#include "number.hpp"
#include "pairs.hpp"

#include <algorithm>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// What a feature map makes of a number.
template <class T>
using feature_of = std::function<T(const T& x)>;
template <class T, class F>
feature_of<T> map_of(const F& phi) {
    return [&phi](const T& x) { return static_cast<T>(phi(x)); };
}

/// What `linear_attention` computes.
template <class T>
void linear_attention_of_pairs(const inputs<T>& in, const outputs<T>& out, const feature_of<T>& phi, const of_head<visible_pairs>& pattern,
                               bool normalise, double eps, double scale) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    std::vector<T> sum(static_cast<std::size_t>(d_v)), query(static_cast<std::size_t>(d_k));
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / kv_heads);
            const auto visible = pattern(b, h);
            tensor<T> keys({1, 1, m, d_k});
            for (index_t j = 0; j < m; ++j)
                for (index_t c = 0; c < d_k; ++c) keys(0, 0, j, c) = phi(in.keys(b, g, j, c));
            for (index_t i = 0; i < n; ++i) {
                for (index_t c = 0; c < d_k; ++c) query[static_cast<std::size_t>(c)] = phi(in.queries(b, h, i, c));
                std::ranges::fill(sum, T{0});
                T denominator = 0;
                bool sees_one = false;
                for (index_t j = 0; j < m; ++j) {
                    if (!visible(in.positions.first_query[b] + i, in.positions.first_key[b] + j)) continue;
                    sees_one = true;
                    T weight = 0;
                    for (index_t c = 0; c < d_k; ++c) weight += query[static_cast<std::size_t>(c)] * keys(0, 0, j, c);
                    denominator += weight;
                    for (index_t c = 0; c < d_v; ++c) sum[static_cast<std::size_t>(c)] += weight * in.values(b, g, j, c);
                }
                for (index_t c = 0; c < d_v; ++c) {
                    const auto numerator = sum[static_cast<std::size_t>(c)];
                    out.values(b, h, i, c) = !sees_one   ? T{0}
                                             : normalise ? numerator / (denominator + static_cast<T>(eps))
                                                         : static_cast<T>(scale) * numerator;
                }
            }
        }
}

} // namespace detail

/// With A_ij = phi(q_i) . phi(k_j) for the keys j that query i sees, everything in T:
///     out_i = sum_j A_ij v_j / (sum_j A_ij + eps),     or scale * sum_j A_ij v_j if not `normalise`
/// A row that sees nothing is zero; what is not seen is never multiplied. Shapes: as in inputs and outputs, taken as checked.
/// Time O(n m (d_k + d_v)) a head. Katharopoulos et al. 2020, "Transformers are RNNs".
template <class T, class F, Pattern P>
void linear_attention(const inputs<T>& in, const outputs<T>& out, const F& phi, const P& pattern, bool normalise, double eps,
                      double scale) {
    detail::linear_attention_of_pairs<T>(in, out, detail::map_of<T>(phi), detail::visible_pairs_of(pattern), normalise, eps, scale);
}

/// x + added, for x (batch, heads, n, d) and added (batch or 1, heads or 1, n, d).
template <class T, class U>
tensor<T> sum_of(const tensor_view<const T>& x, const tensor_view<const U>& added) {
    const auto [batch, heads, n, d] = x.shape();
    tensor<T> result(x.shape());
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i)
                for (index_t c = 0; c < d; ++c) {
                    result(b, h, i, c) = x(b, h, i, c);
                    if (added.data())
                        result(b, h, i, c) +=
                            static_cast<T>(added(added.shape().batch == 1 ? 0 : b, added.shape().heads == 1 ? 0 : h, i, c));
                }
    return result;
}

/// Focused features of x (batch, heads, n, d), everything in T:
///     u = (relu(x) + 1e-6) / softplus(scale),      f = |u| u^p / |u^p|
/// the power by channel, the norms over all channels of all heads of a token. scale: none (0), d numbers, or d for each head.
/// Han et al. 2023, "FLatten Transformer".
template <class T, class U>
tensor<T> focused_features(const tensor_view<const T>& x, int power, std::span<const U> scale) {
    const auto [batch, heads, n, d] = x.shape();
    tensor<T> result(x.shape());
    for (index_t b = 0; b < batch; ++b)
        for (index_t i = 0; i < n; ++i) {
            T largest = 0, squares = 0, squares_of_powers = 0;
            const auto each = [&](auto&& f) {
                for (index_t h = 0; h < heads; ++h)
                    for (index_t c = 0; c < d; ++c) {
                        const auto own = static_cast<std::size_t>(std::ssize(scale) > d ? h * d + c : c);
                        const T s = scale.empty() ? T{0} : static_cast<T>(scale[own]), y = x(b, h, i, c);
                        f(h, c, ((y < 0 ? T{0} : y) + static_cast<T>(1e-6)) / (max(s, T{0}) + log1p(exp(-abs(s)))));
                    }
            };
            each([&](index_t, index_t, T u) { squares += u * u; });
            // u^p / |u^p| is that of u / max u, whose norm no power takes out of range.
            each([&](index_t, index_t, T u) { largest = max(largest, u); });
            each([&](index_t, index_t, T u) { squares_of_powers += pow(u / largest, static_cast<T>(2 * power)); });
            each([&](index_t h, index_t c, T u) {
                result(b, h, i, c) = sqrt(squares) * pow(u / largest, static_cast<T>(power)) / sqrt(squares_of_powers);
            });
        }
    return result;
}

} // namespace attn::reference
