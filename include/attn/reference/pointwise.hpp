// The definition of pointwise attention and its gradient: the printed formulas, one pair at a time.
#pragma once

#include "pairs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// Calls f(b, h, g, row, key, x, s) for each pair that is seen: x is the scaled product, s what the score function makes of it.
template <class T>
void for_each_seen_pair(const inputs<T>& in, double scale, const auto& scores, const visible_pairs& pattern, const auto& f) {
    for (index_t b = 0; b < in.queries.shape().batch; ++b)
        for (index_t h = 0; h < in.queries.shape().heads; ++h) {
            const auto g = h / (in.queries.shape().heads / in.keys.shape().heads);
            const auto score = scores(b, h);
            const auto visible = pattern(b, h);
            for (index_t row = 0; row < in.queries.shape().tokens; ++row)
                for (index_t key = 0; key < in.keys.shape().tokens; ++key) {
                    const auto i = in.positions.first_query[b] + row, j = in.positions.first_key[b] + key;
                    if (!visible(i, j)) continue;
                    const T x = scaled_product(in, static_cast<T>(scale), b, h, g, row, key);
                    const auto s = score(x, i, j);
                    if (s.value != -std::numeric_limits<T>::infinity()) f(b, h, g, row, key, x, s);
                }
        }
}

} // namespace detail

/// Pointwise attention by its formula, everything in T:
///     s_ij = score(scale * sum_c q[b,h,i,c] k[b,g,j,c], i, j)      g = h / (heads / kv_heads)
///     out[b,h,i,:] = sum over seen j of weight(s_ij) v[b,g,j,:]
/// A key is seen if the pattern says so and its score is not -infinity; what is not seen is never multiplied. A row that sees nothing is 0.
/// out holds zeros before. Shapes: as in inputs. They, the pattern and the score function are taken as checked. Time O(n m (d_k + d_v)).
template <class T>
void pointwise(const inputs<T>& in, const tensor_view<T>& out, const auto& weight, double scale, const detail::pair_scores<T, false>& score,
               const detail::visible_pairs& pattern) {
    const auto add = [&](index_t b, index_t h, index_t g, index_t row, index_t key, T, const dual<T>& s) {
        const T w = static_cast<T>(weight(s.value));
        for (index_t c = 0; c < out.shape().channels; ++c) out(b, h, row, c) += w * in.values(b, g, key, c);
    };
    detail::for_each_seen_pair<T>(in, scale, score, pattern, add);
}

/// The gradient of pointwise attention by its formulas, everything in T: with s_ij as in `pointwise` and a given gradient dO of out,
///     dw_ij = sum_c dO[i,c] v[j,c],      ds_ij = weight'(s_ij) dw_ij,      dx_ij = score'(x_ij) ds_ij
///     dv_j = sum_i weight(s_ij) dO_i,      dq_i = scale sum_j dx_ij k_j,      dk_j = scale sum_i dx_ij q_i
/// over the pairs that are seen, with dk and dv summed over the query heads that share them. A view without memory is not wanted; the
/// others hold zeros before. of_pair(b, h, i, j, x, ds, s, dw) is called for each pair, with positions: what gradients of parameters are
/// made of.
template <class T>
void pointwise_gradients(const inputs<T>& in, const tensor_view<const T>& d_out, const input_gradients<T>& wanted, const auto& weight,
                         double scale, const detail::pair_scores<T, true>& score, const detail::visible_pairs& pattern,
                         const auto& of_pair) {
    const auto d_k = in.queries.shape().channels, d_v = in.values.shape().channels;
    const auto add = [&](index_t b, index_t h, index_t g, index_t row, index_t key, T x, const dual<T>& s) {
        const auto w = attn::detail::differentiated(weight, s.value);
        const auto dw = detail::sum_over<T>(d_v, [&](index_t c) { return d_out(b, h, row, c) * in.values(b, g, key, c); });
        const T ds = dw * w.derivative, dx = static_cast<T>(scale) * (s.derivative * ds);
        of_pair(b, h, in.positions.first_query[b] + row, in.positions.first_key[b] + key, x, ds, s.value, dw);
        for (index_t c = 0; wanted.values.data() && c < d_v; ++c) wanted.values(b, g, key, c) += w.value * d_out(b, h, row, c);
        for (index_t c = 0; wanted.keys.data() && c < d_k; ++c) wanted.keys(b, g, key, c) += dx * in.queries(b, h, row, c);
        for (index_t c = 0; wanted.queries.data() && c < d_k; ++c) wanted.queries(b, h, row, c) += dx * in.keys(b, g, key, c);
    };
    detail::for_each_seen_pair<T>(in, scale, score, pattern, add);
}

} // namespace attn::reference
