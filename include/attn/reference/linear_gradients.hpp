// The definition of the gradient of linear attention: the printed formulas, one query at a time.
#pragma once

#include "../core/gradients.hpp"
#include "linear_attention.hpp"
#include "number.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// What `linear_gradients` computes. slope: that of phi.
template <class T>
void linear_gradients_of_pairs(const inputs<T>& in, const tensor_view<const T>& d_out, const input_gradients<T>& wanted,
                               const feature_of<T>& phi, const feature_of<T>& slope, const of_head<visible_pairs>& pattern, bool normalise,
                               double eps, double scale) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto features = [&](const auto& x) {
        tensor<T> result(x.shape());
        const auto& s = x.shape();
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) result(b, h, i, c) = phi(x(b, h, i, c));
        return result;
    };
    const auto f = features(in.queries), e = features(in.keys);
    tensor<T> of_f(f.shape()), of_e(e.shape()), of_values(in.values.shape());
    for (auto* t : {&of_f, &of_e, &of_values}) std::fill_n(t->data(), t->shape().size(), T{0});
    tensor<char> is_seen({batch, kv_heads, m, 1}), sees({batch, heads, n, 1});
    for (auto* t : {&is_seen, &sees}) std::fill_n(t->data(), t->shape().size(), char{0});
    std::vector<T> weights(static_cast<std::size_t>(m));

    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / kv_heads);
            const auto visible = pattern(b, h);
            for (index_t i = 0; i < n; ++i) {
                const auto for_each_seen = [&](const auto& visit) {
                    for (index_t j = 0; j < m; ++j)
                        if (visible(in.positions.first_query[b] + i, in.positions.first_key[b] + j))
                            visit(j, weights[static_cast<std::size_t>(j)]);
                };
                T denominator = static_cast<T>(eps);
                for_each_seen([&](index_t j, T& weight) {
                    weight = 0;
                    for (index_t c = 0; c < d_k; ++c) weight += f(b, h, i, c) * e(b, g, j, c);
                    denominator += weight;
                    is_seen(b, g, j, 0) = sees(b, h, i, 0) = 1;
                });
                const T factor = normalise ? 1 / denominator : static_cast<T>(scale);
                const auto d_out_by_value = [&](index_t j) {
                    T product = 0;
                    for (index_t c = 0; c < d_v; ++c) product += d_out(b, h, i, c) * in.values(b, g, j, c);
                    return product;
                };
                T of_denominator = 0; // dO_i . out_i
                if (normalise) for_each_seen([&](index_t j, T& weight) { of_denominator += weight * factor * d_out_by_value(j); });
                for_each_seen([&](index_t j, T& weight) {
                    const T of_weight = (d_out_by_value(j) - of_denominator) * factor;
                    for (index_t c = 0; c < d_v; ++c) of_values(b, g, j, c) += weight * factor * d_out(b, h, i, c);
                    for (index_t c = 0; c < d_k; ++c) of_f(b, h, i, c) += of_weight * e(b, g, j, c);
                    for (index_t c = 0; c < d_k; ++c) of_e(b, g, j, c) += of_weight * f(b, h, i, c);
                });
            }
        }

    // What is not seen gives 0, whatever it holds.
    const auto write = [](const tensor_view<T>& to, const auto& takes_part, const auto& gradient) {
        const auto& s = to.shape();
        for (index_t b = 0; to.data() && b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) to(b, h, i, c) = takes_part(b, h, i, 0) ? gradient(b, h, i, c) : T{0};
    };
    const auto through = [&](const tensor<T>& of_features, const auto& x) {
        return [&of_features, &slope, x](index_t b, index_t h, index_t i, index_t c) {
            return of_features(b, h, i, c) * slope(x(b, h, i, c));
        };
    };
    write(wanted.queries, sees, through(of_f, in.queries));
    write(wanted.keys, is_seen, through(of_e, in.keys));
    write(wanted.values, is_seen, of_values);
}

} // namespace detail

/// The gradient of linear attention by its formulas, everything in T. With A_ij = phi(q_i) . phi(k_j) for the keys j that query i sees,
/// given gradients dO of out, and N_i = sum_j A_ij + eps (without `normalise` N_i = 1 / scale, a constant):
///     dv_j = sum_i A_ij / N_i dO_i,      dA_ij = (dO_i . v_j - dO_i . out_i) / N_i         (without `normalise` scale dO_i . v_j)
///     dq_i = phi'(q_i) sum_j dA_ij phi(k_j),      dk_j = phi'(k_j) sum_i dA_ij phi(q_i)         (channel by channel)
/// with dk and dv summed over the query heads that share them. phi' is phi's slope by its text on dual numbers, or what its member
/// `derivative` says. A view without memory is not wanted. Shapes and pattern are taken as checked.
template <class T, class F, Pattern P>
void linear_gradients(const inputs<T>& in, const tensor_view<const T>& d_out, const input_gradients<T>& wanted, const F& phi,
                      const P& pattern, bool normalise, double eps, double scale) {
    detail::linear_gradients_of_pairs<T>(
        in, d_out, wanted, detail::map_of<T>(phi), [&phi](const T& x) { return attn::detail::differentiated(phi, x).derivative; },
        detail::visible_pairs_of(pattern), normalise, eps, scale);
}

/// The gradient of focused features by its formula, everything in T: what x (batch, heads, n, d) and the scale get of g, that of f. With
/// w = u / max u, M = |w^p|, N = |w|, and sums over all channels of all heads of a token:
///     du = w s / N + N (p w^(p - 1) / M g - s p w^(2 p - 1) / M^2),      s = sum g w^p / M
///     dx = du / softplus(scale) where x > 0,      d scale = - sum over tokens of du u / softplus(scale) sigmoid(scale)
/// d scale is added to of_scale, which may be empty. Tokens from present[batch] on, if that is given, get 0 and give nothing.
template <class T, class U>
void focused_gradients(const tensor_view<const T>& x, int power, std::span<const U> scale, const tensor_view<const T>& d_out,
                       std::span<const index_t> present, const tensor_view<T>& to, std::span<T> of_scale) {
    const auto [batch, heads, n, d] = x.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t i = 0; i < n; ++i) {
            const bool takes_part = present.empty() || i < present[static_cast<std::size_t>(b)];
            T largest = 0, squares = 0, squares_of_powers = 0, s = 0;
            const auto each = [&](auto&& f) {
                for (index_t h = 0; h < heads; ++h)
                    for (index_t c = 0; c < d; ++c) {
                        const auto own = static_cast<std::size_t>(std::ssize(scale) > d ? h * d + c : c);
                        const T before = scale.empty() ? T{0} : static_cast<T>(scale[own]), y = x(b, h, i, c);
                        const T softplus = max(before, T{0}) + log1p(exp(-abs(before)));
                        f(h, c, own, (y < 0 ? T{0} : y) + static_cast<T>(1e-6), softplus);
                    }
            };
            const auto raised = [](T w, int exponent) { return pow(w, static_cast<T>(exponent)); };
            each([&](index_t, index_t, std::size_t, T relu_x, T softplus) { largest = max(largest, relu_x / softplus); });
            each([&](index_t, index_t, std::size_t, T relu_x, T softplus) {
                const T w = relu_x / softplus / largest;
                squares += w * w;
                squares_of_powers += raised(w, 2 * power);
            });
            const T norm = sqrt(squares), norm_of_powers = sqrt(squares_of_powers);
            each([&](index_t h, index_t c, std::size_t, T relu_x, T softplus) {
                if (takes_part) s += d_out(b, h, i, c) * raised(relu_x / softplus / largest, power) / norm_of_powers;
            });
            each([&](index_t h, index_t c, std::size_t own, T relu_x, T softplus) {
                if (!takes_part) {
                    to(b, h, i, c) = 0;
                    return;
                }
                const T u = relu_x / softplus, w = u / largest, p = static_cast<T>(power);
                const T through_power =
                    p * raised(w, power - 1) / norm_of_powers * d_out(b, h, i, c) - s * p * raised(w, 2 * power - 1) / squares_of_powers;
                const T of_u = w * s / norm + norm * through_power;
                to(b, h, i, c) = of_u / softplus * (x(b, h, i, c) > 0 ? T{1} : T{0});
                if (!of_scale.empty()) of_scale[own] -= of_u * u / softplus / (1 + exp(-static_cast<T>(scale[own])));
            });
        }
}

} // namespace attn::reference
