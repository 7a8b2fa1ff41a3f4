// The definition of the gradient of projected attention: softmax attention's over the projected rows, then each projection's by its
// formula.
#pragma once

#include "linformer.hpp"
#include "number.hpp"
#include "softmax_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// Calls f(r, gradient of row r) for the rows that are there.
template <class T>
void for_each_row(const projected_tokens<T>& d_out, const auto& f) {
    for (std::size_t r = 0; r < d_out.size(); ++r)
        if (d_out[r]) f(static_cast<index_t>(r), [&row = *d_out[r]](index_t c) { return row[static_cast<std::size_t>(c)]; });
}

} // namespace detail

/// The gradients of identity_projection, from the gradients g of the rows that it gives: dx[r, c] += g[r, c]. Here and below of_x is (1, 1,
/// m, channels); what has no memory is left out.
template <class T>
void identity_projection_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x) {
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        for (index_t c = 0; c < x.channels(); ++c) of_x(0, 0, r, c) += g(c);
    });
}

/// The gradients of linear_projection, over the visible j:
///     dx[j, c] += matrix[r, j] g[r, c],      dmatrix[r, j] += sum_c g[r, c] x[j, c],      dbias[r] += sum_c g[r, c]
template <class T, class U>
void linear_projection_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                 const tensor_view<const U>& matrix, const tensor_view<T>& of_matrix, const tensor_view<T>& of_bias) {
    const auto head = detail::head_of(matrix, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        x.for_each_visible(0, x.count(), [&](index_t j) {
            for (index_t c = 0; c < x.channels(); ++c) {
                of_x(0, 0, j, c) += static_cast<T>(matrix(0, head, r, j)) * g(c);
                if (of_matrix.data()) of_matrix(0, head, r, j) += g(c) * x(j, c);
            }
        });
        for (index_t c = 0; of_bias.data() && c < x.channels(); ++c) of_bias(0, of_bias.shape().heads == 1 ? 0 : x.head, r, 0) += g(c);
    });
}

/// The gradient of mean_pooling: dx[j, c] += g[r, c] / (visible tokens of bin r) for the visible j of bin r.
template <class T>
void mean_pooling_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x) {
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        const auto [first, end] = pooling_bin(r, x.count(), std::ssize(d_out));
        T seen = 0;
        x.for_each_visible(first, end, [&](index_t) { seen += 1; });
        x.for_each_visible(first, end, [&](index_t j) {
            for (index_t c = 0; c < x.channels(); ++c) of_x(0, 0, j, c) += g(c) / seen;
        });
    });
}

/// The gradient of max_pooling: dx[j, c] += g[r, c] for the visible j of bin r whose number is the largest, of equal ones the first, of NaN
/// the last.
template <class T>
void max_pooling_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x) {
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        const auto [first, end] = pooling_bin(r, x.count(), std::ssize(d_out));
        for (index_t c = 0; c < x.channels(); ++c) {
            T largest = -std::numeric_limits<T>::infinity();
            index_t taken = -1;
            x.for_each_visible(first, end, [&](index_t j) {
                if (x(j, c) > largest || isnan(x(j, c))) largest = x(j, c), taken = j;
            });
            if (taken >= 0) of_x(0, 0, taken, c) += g(c);
        }
    });
}

/// The gradients of channel_convolution, with j = kernel r + t visible:
///     dx[j, c] += weights[t, c] g[r, c],      dweights[t, c] += g[r, c] x[j, c],      dbias[c] += g[r, c]
template <class T, class U>
void channel_convolution_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                   const tensor_view<const U>& weights, const tensor_view<T>& of_weights, const tensor_view<T>& of_bias) {
    const auto kernel = weights.shape().tokens, head = detail::head_of(weights, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        for (index_t c = 0; c < x.channels(); ++c) {
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                of_x(0, 0, j, c) += static_cast<T>(weights(0, head, j - r * kernel, c)) * g(c);
                if (of_weights.data()) of_weights(0, head, j - r * kernel, c) += g(c) * x(j, c);
            });
            if (of_bias.data()) of_bias(0, of_bias.shape().heads == 1 ? 0 : x.head, 0, c) += g(c);
        }
    });
}

/// The gradients of mixing_convolution, with j = kernel r + t visible:
///     dx[j, c] += sum_o weights[t, o, c] g[r, o],      dweights[t, o, c] += g[r, o] x[j, c],      dbias[o] += g[r, o]
template <class T, class U>
void mixing_convolution_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                  const tensor_view<const U>& weights, const tensor_view<T>& of_weights, const tensor_view<T>& of_bias) {
    const auto kernel = weights.shape().batch, head = detail::head_of(weights, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        for (index_t o = 0; o < x.channels(); ++o) {
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                for (index_t c = 0; c < x.channels(); ++c) {
                    of_x(0, 0, j, c) += static_cast<T>(weights(j - r * kernel, head, o, c)) * g(o);
                    if (of_weights.data()) of_weights(j - r * kernel, head, o, c) += g(o) * x(j, c);
                }
            });
            if (of_bias.data()) of_bias(0, of_bias.shape().heads == 1 ? 0 : x.head, 0, o) += g(o);
        }
    });
}

/// The gradient of `linformer`: that of softmax attention over the projected rows, dk' and dv' of them, then
///     of_key_projection(tokens, dk', dk),      of_value_projection(tokens, dv', dv)
/// for each batch entry and head, which add to dk and dv (1, 1, m, channels), zeros before, and to the gradients of their parameters. A row
/// that is left out has no gradient. A view of `wanted` without memory is not wanted.
template <class T, Pattern P = dense>
void linformer_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& wanted, const auto& project_keys,
                         const auto& project_values, const auto& of_key_projection, const auto& of_value_projection,
                         std::optional<double> scale = {}, const P& pattern = {}) {
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    const auto d_k = in.keys.shape().channels;
    for (index_t b = 0; b < kv_batch; ++b)
        for (index_t g = 0; g < kv_heads; ++g) {
            const auto group = in.queries.shape().heads / kv_heads;
            const auto visible = visible_tokens(in, pattern, b, g);
            const tokens<T> key_tokens{in.keys, b, g, visible}, value_tokens{in.values, b, g, visible};
            const auto keys = project_keys(key_tokens), values = project_values(value_tokens);
            std::vector<T> k, v;
            for (std::size_t r = 0; r < keys.size(); ++r) {
                if (!keys[r] || !values[r]) continue;
                k.insert(k.end(), keys[r]->begin(), keys[r]->end());
                v.insert(v.end(), values[r]->begin(), values[r]->end());
            }
            const auto rows = static_cast<index_t>(k.size()) / d_k;
            const tensor_part some{.batch = {b, 1}, .heads = {g * group, group}};
            std::vector<T> of_k(k.size()), of_v(v.size());
            const inputs<T> projected{in.queries.slice(some), head_major<const T>(k.data(), {1, 1, rows, d_k}),
                                      head_major<const T>(v.data(), {1, 1, rows, d_v})};
            softmax_gradients<T>(
                projected, d_out.slice(some),
                {wanted.queries.slice(some), head_major(of_k.data(), {1, 1, rows, d_k}), head_major(of_v.data(), {1, 1, rows, d_v})}, {},
                scale);

            const auto find = [&](const auto& projection, const tokens<T>& x, const std::vector<T>& numbers, const tensor_view<T>& to) {
                projected_tokens<T> of_rows(keys.size());
                auto next = numbers.begin();
                for (std::size_t r = 0; r < keys.size(); ++r) {
                    if (!keys[r] || !values[r]) continue;
                    of_rows[r].emplace(next, next + x.channels());
                    next += x.channels();
                }
                tensor<T> of_tokens({1, 1, m, x.channels()});
                std::fill_n(of_tokens.data(), of_tokens.shape().size(), T{0});
                projection(x, of_rows, of_tokens.view());
                for (index_t j = 0; to.data() && j < m; ++j)
                    for (index_t c = 0; c < x.channels(); ++c) to(b, g, j, c) = of_tokens(0, 0, j, c);
            };
            find(of_key_projection, key_tokens, of_k, wanted.keys);
            find(of_value_projection, value_tokens, of_v, wanted.values);
        }
}

} // namespace attn::reference
