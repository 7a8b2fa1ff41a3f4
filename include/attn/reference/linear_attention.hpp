// The definition of linear attention and its gradient: its n x m weights, one query at a time.
#pragma once

#include "../core/tensor.hpp"
#include "pairs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// A feature map, which outlives it: what it makes of a number, and its slope there, if that is asked for.
template <class T, bool differentiated>
struct feature_function {
    std::function<T(const T& x)> value, slope = {};

    template <class F>
    feature_function(const F& phi) : value([&phi](const T& x) { return static_cast<T>(phi(x)); }) {
        if constexpr (differentiated) slope = [&phi](const T& x) { return attn::detail::differentiated(phi, x).derivative; };
    }
};
/// A key that a query sees, and its weight.
template <class T>
struct weighed_key {
    index_t row;
    T weight;
};

/// f of each number of x.
template <class T>
tensor<T> features_of(const stored_view<const T>& x, const std::function<T(const T&)>& f) {
    tensor<T> result(x.shape());
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) { result(b, h, i, c) = f(x(b, h, i, c)); });
    return result;
}
/// Calls visit(b, h, g, i, weighed keys that query i sees) for each query, of features f of the queries and e of the keys.
template <class T>
void for_each_linear_row(const inputs<T>& in, const tensor<T>& f, const tensor<T>& e, const visible_pairs& pattern, const auto& visit) {
    std::vector<weighed_key<T>> seen;
    for (index_t b = 0; b < f.shape().batch; ++b)
        for (index_t h = 0; h < f.shape().heads; ++h) {
            const auto g = h / (f.shape().heads / in.values.shape().heads);
            const auto visible = pattern(b, h);
            for (index_t i = 0; i < f.shape().tokens; ++i) {
                seen.clear();
                for (index_t j = 0; j < in.values.shape().tokens; ++j) {
                    if (!visible(in.positions.first_query[b] + i, in.positions.first_key[b] + j)) continue;
                    seen.push_back({j, sum_over<T>(f.shape().channels, [&](index_t c) { return f(b, h, i, c) * e(b, g, j, c); })});
                }
                visit(b, h, g, i, seen);
            }
        }
}

/// Calls f(h, c, number of the scale, relu(x) + 1e-6, softplus(scale)) for each channel of each head of a token, whose focused features are
/// asked for.
template <class T, class U>
void for_each_focused(const tensor_view<const T>& x, std::span<const U> scale, index_t b, index_t i, const auto& f) {
    const auto [batch, heads, n, d] = x.shape();
    for (index_t h = 0; h < heads; ++h)
        for (index_t c = 0; c < d; ++c) {
            const auto own = static_cast<std::size_t>(std::ssize(scale) > d ? h * d + c : c);
            const T s = scale.empty() ? T{0} : static_cast<T>(scale[own]), y = x(b, h, i, c);
            f(h, c, own, (y < 0 ? T{0} : y) + static_cast<T>(1e-6), max(s, T{0}) + log1p(exp(-abs(s))));
        }
}

/// Linear attention of features that are there.
template <class T>
void attend_to_features(const inputs<T>& in, const tensor<T>& f, const tensor<T>& e, const outputs<T>& out, const visible_pairs& pattern,
                        bool normalise, double eps, double scale) {
    for_each_linear_row(in, f, e, pattern, [&](index_t b, index_t h, index_t g, index_t i, const std::vector<weighed_key<T>>& seen) {
        const auto denominator = sum_over<T>(seen, [](const auto& k) { return k.weight; });
        for (index_t c = 0; c < in.values.shape().channels; ++c) {
            const auto sum = sum_over<T>(seen, [&](const auto& k) { return k.weight * in.values(b, g, k.row, c); });
            out.values(b, h, i, c) = seen.empty() ? T{0}
                                     : normalise  ? sum / (denominator + static_cast<T>(eps))
                                                  : static_cast<T>(scale) * sum;
        }
    });
}

/// The gradients of linear attention by features of queries and keys, and by values; and who takes part: what is not seen does not.
template <class T>
struct feature_gradients {
    tensor<T> of_f, of_e, of_values;
    tensor<char> sees, is_seen;

    feature_gradients(const inputs<T>& in, const tensor<T>& f, const tensor<T>& e, const tensor_view<const T>& d_out,
                      const visible_pairs& pattern, bool normalise, double eps, double scale)
        : of_f(f.shape()), of_e(e.shape()), of_values(in.values.shape()), sees(tokens_of(f)), is_seen(tokens_of(e)) {
        const auto features = f.shape().channels, d_v = in.values.shape().channels;
        for_each_linear_row(in, f, e, pattern, [&](index_t b, index_t h, index_t g, index_t i, const std::vector<weighed_key<T>>& seen) {
            T denominator = static_cast<T>(eps);
            for (const auto& k : seen) denominator += k.weight;
            const T factor = normalise ? 1 / denominator : static_cast<T>(scale);
            const auto d_out_by_value = [&](index_t j) {
                return sum_over<T>(d_v, [&](index_t c) { return d_out(b, h, i, c) * in.values(b, g, j, c); });
            };
            const auto share = [&](const auto& k) { return normalise ? k.weight * factor * d_out_by_value(k.row) : T{0}; };
            const auto of_denominator = sum_over<T>(seen, share); // dO_i . out_i
            for (const auto& [j, weight] : seen) {
                is_seen(b, g, j, 0) = sees(b, h, i, 0) = 1;
                const T of_weight = (d_out_by_value(j) - of_denominator) * factor;
                for (index_t c = 0; c < d_v; ++c) of_values(b, g, j, c) += weight * factor * d_out(b, h, i, c);
                for (index_t c = 0; c < features; ++c) of_f(b, h, i, c) += of_weight * e(b, g, j, c);
                for (index_t c = 0; c < features; ++c) of_e(b, g, j, c) += of_weight * f(b, h, i, c);
            }
        });
    }
    /// Writes gradient(b, h, i, c) for what takes part, and 0 for the rest, whatever it holds. To no memory nothing.
    static void write(const tensor_view<T>& to, const tensor<char>& takes_part, const auto& gradient) {
        if (!to.data()) return;
        attn::detail::for_each_number(to.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
            to(b, h, i, c) = takes_part(b, h, i, 0) ? gradient(b, h, i, c) : T{0};
        });
    }

private:
    static shape tokens_of(const tensor<T>& t) { return {t.shape().batch, t.shape().heads, t.shape().tokens, 1}; }
};

} // namespace detail

/// With A_ij = phi(q_i) . phi(k_j) for the keys j that query i sees, everything in T:
///     out_i = sum_j A_ij v_j / (sum_j A_ij + eps),     or scale * sum_j A_ij v_j if not `normalise`
/// A row that sees nothing is zero; what is not seen is never multiplied. Shapes: as in inputs and outputs, taken as checked.
/// Time O(n m (d_k + d_v)) a head. Katharopoulos et al. 2020, "Transformers are RNNs".
template <class T>
void linear_attention(const inputs<T>& in, const outputs<T>& out, const detail::feature_function<T, false>& phi,
                      const detail::visible_pairs& pattern, bool normalise, double eps, double scale) {
    const auto f = detail::features_of(in.queries, phi.value), e = detail::features_of(in.keys, phi.value);
    detail::attend_to_features(in, f, e, out, pattern, normalise, eps, scale);
}

/// The gradient of linear attention by its formulas, everything in T. With A_ij = phi(q_i) . phi(k_j) for the keys j that query i sees,
/// given gradients dO of out, and N_i = sum_j A_ij + eps (without `normalise` N_i = 1 / scale, a constant):
///     dv_j = sum_i A_ij / N_i dO_i,      dA_ij = (dO_i . v_j - dO_i . out_i) / N_i         (without `normalise` scale dO_i . v_j)
///     dq_i = phi'(q_i) sum_j dA_ij phi(k_j),      dk_j = phi'(k_j) sum_i dA_ij phi(q_i)         (channel by channel)
/// with dk and dv summed over the query heads that share them. phi' is phi's slope by its text on dual numbers, or what its member
/// `derivative` says. A view without memory is not wanted. Shapes and pattern are taken as checked.
template <class T>
void linear_gradients(const inputs<T>& in, const tensor_view<const T>& d_out, const input_gradients<T>& wanted,
                      const detail::feature_function<T, true>& phi, const detail::visible_pairs& pattern, bool normalise, double eps,
                      double scale) {
    const auto f = detail::features_of(in.queries, phi.value), e = detail::features_of(in.keys, phi.value);
    const detail::feature_gradients<T> of(in, f, e, d_out, pattern, normalise, eps, scale);
    const auto through = [&](const tensor<T>& of_features, const auto& x) {
        return [&](index_t b, index_t h, index_t i, index_t c) { return of_features(b, h, i, c) * phi.slope(x(b, h, i, c)); };
    };
    of.write(wanted.queries, of.sees, through(of.of_f, in.queries));
    of.write(wanted.keys, of.is_seen, through(of.of_e, in.keys));
    of.write(wanted.values, of.is_seen, of.of_values);
}

/// x + added, for x (batch, heads, n, d) and added (batch or 1, heads or 1, n, d).
template <class T, class U>
tensor<T> sum_of(const tensor_view<const T>& x, const tensor_view<const U>& added) {
    tensor<T> result(x.shape());
    attn::detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
        result(b, h, i, c) = x(b, h, i, c);
        if (!added.data()) return;
        result(b, h, i, c) += static_cast<T>(added(added.shape().batch == 1 ? 0 : b, added.shape().heads == 1 ? 0 : h, i, c));
    });
    return result;
}

/// Focused features of x (batch, heads, n, d), everything in T:
///     u = (relu(x) + 1e-6) / softplus(scale),      f = |u| u^p / |u^p|
/// the power by channel, the norms over all channels of all heads of a token. scale: none (0), d numbers, or d for each head.
/// Han et al. 2023, "FLatten Transformer".
template <class T, class U>
tensor<T> focused_features(const tensor_view<const T>& x, int power, std::span<const U> scale) {
    tensor<T> result(x.shape());
    for (index_t b = 0; b < x.shape().batch; ++b)
        for (index_t i = 0; i < x.shape().tokens; ++i) {
            T largest = 0, squares = 0, squares_of_powers = 0;
            const auto each = [&](const auto& f) {
                detail::for_each_focused<T>(x, scale, b, i,
                                            [&](index_t h, index_t c, std::size_t, T relu_x, T softplus) { f(h, c, relu_x / softplus); });
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

/// The gradient of focused features by its formula, everything in T: what x (batch, heads, n, d) and the scale get of g, that of f. With
/// w = u / max u, M = |w^p|, N = |w|, and sums over all channels of all heads of a token:
///     du = w s / N + N (p w^(p - 1) / M g - s p w^(2 p - 1) / M^2),      s = sum g w^p / M
///     dx = du / softplus(scale) where x > 0,      d scale = - sum over tokens of du u / softplus(scale) sigmoid(scale)
/// d scale is added to of_scale, which may be empty. Tokens from present[batch] on, if that is given, get 0 and give nothing.
template <class T, class U>
void focused_gradients(const tensor_view<const T>& x, int power, std::span<const U> scale, const tensor_view<const T>& d_out,
                       std::span<const index_t> present, const tensor_view<T>& to, std::span<T> of_scale) {
    for (index_t b = 0; b < x.shape().batch; ++b)
        for (index_t i = 0; i < x.shape().tokens; ++i) {
            const bool takes_part = present.empty() || i < present[static_cast<std::size_t>(b)];
            T largest = 0, squares = 0, squares_of_powers = 0, s = 0;
            const auto each = [&](const auto& f) { detail::for_each_focused<T>(x, scale, b, i, f); };
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
