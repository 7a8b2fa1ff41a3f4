// The definition of softmax attention and its gradient: the printed formulas, one query at a time.
#pragma once

#include "pairs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// A key that a query sees: its row, the scaled product, what the score function makes of that, and the weight.
template <class T>
struct seen_key {
    index_t row;
    T product;
    dual<T> score;
    T weight;
};
/// A row of softmax attention: where it is, the keys that it sees, and the denominator of their weights, relative to the largest score.
template <class T>
struct softmax_row {
    index_t batch, head, kv_head, row;
    T sink, largest, of_sink, denominator; ///< of_sink: its share of the denominator
    std::vector<seen_key<T>> seen;

    /// The mean of a channel of the values, by the weights of the keys that it sees.
    T mean(const stored_view<const T>& values, index_t c) const {
        return sum_over<T>(seen, [&](const auto& k) { return k.weight * values(batch, kv_head, k.row, c); });
    }
};
/// Calls f(softmax_row) for each row.
template <class T>
void for_each_softmax_row(const inputs<T>& in, const std::optional<double>& scale, const auto& scores, const visible_pairs& pattern,
                          std::span<const double> sinks, const auto& f) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto factor = scale_of(in, scale);
    softmax_row<T> own;
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h) {
            const auto g = h / (heads / in.values.shape().heads);
            const auto score = scores(b, h);
            const auto visible = pattern(b, h);
            own.sink = sink_of<T>(sinks, h);
            for (index_t row = 0; row < n; ++row) {
                const auto i = in.positions.first_query[b] + row;
                own.batch = b, own.head = h, own.kv_head = g, own.row = row;
                own.seen.clear();
                own.largest = own.sink;
                for (index_t key = 0; key < in.values.shape().tokens; ++key) {
                    const auto j = in.positions.first_key[b] + key;
                    if (!visible(i, j)) continue;
                    const T product = scaled_product(in, factor, b, h, g, row, key);
                    const auto s = score(product, i, j);
                    if (s.value == -std::numeric_limits<T>::infinity()) continue;
                    own.seen.push_back({key, product, s, 0});
                    own.largest = max(own.largest, s.value);
                }
                own.denominator = own.of_sink = sink_share(own.sink, own.largest);
                for (auto& k : own.seen) own.denominator += k.weight = exp(k.score.value - own.largest);
                for (auto& k : own.seen) k.weight /= own.denominator;
                f(std::as_const(own));
            }
        }
}

} // namespace detail

/// Softmax attention by its formula, everything in T: with double the reference, with float the textbook that kernels are judged against.
///     s_ij = score(scale * sum_c q[b,h,i,c] k[b,g,j,c], i, j)      g = h / (heads / kv_heads)
///     Z_i  = exp(sink_h) + sum over seen j of exp(s_ij)
///     out[b,h,i,:] = sum over seen j of exp(s_ij) / Z_i * v[b,g,j,:],      log_sum_exp[b,h,i] = log Z_i
/// A key is seen if the pattern says so and its score is not -infinity; what is not seen is never multiplied. A row that sees
/// nothing is zero, with the sink as its log_sum_exp, -infinity without one. A NaN score makes its row NaN, and so does a NaN sink; one of
/// +infinity leaves no weight to the keys.
/// Shapes: as in inputs and outputs. They, the pattern and the score function are taken as checked.
/// scale: 1 / sqrt(d_k) if not given. sinks: none, or one per head. Time O(n m (d_k + d_v)) a head, memory O(m).
/// Vaswani et al. 2017, "Attention Is All You Need"; sinks: OpenAI 2025, gpt-oss.
template <class T>
void softmax(const inputs<T>& in, const outputs<T>& out, std::optional<double> scale = {},
             const detail::pair_scores<T, false>& score = identity_score{}, const detail::visible_pairs& pattern = dense{},
             std::span<const double> sinks = {}) {
    detail::for_each_softmax_row<T>(in, scale, score, pattern, sinks, [&](const detail::softmax_row<T>& r) {
        for (index_t c = 0; c < in.values.shape().channels; ++c) out.values(r.batch, r.head, r.row, c) = r.mean(in.values, c);
        if (out.log_sum_exp.data()) out.log_sum_exp(r.batch, r.head, r.row, 0) = r.largest + log(r.denominator);
    });
}

/// The gradient of softmax attention by its formulas, everything in T: what `softmax` computes is s_ij, Z_i and out_i; then, with given
/// gradients dO of out and dL of log_sum_exp (0 without memory),
///     P_ij = exp(s_ij) / Z_i,      D_i = sum_c dO[i,c] out[i,c]
///     dv_j = sum_i P_ij dO_i,      dx_ij = P_ij (sum_c dO[i,c] v[j,c] - D_i + dL_i) score'(x_ij)
///     dq_i = scale sum_j dx_ij k_j,      dk_j = scale sum_i dx_ij q_i,      dsink_h = sum_i exp(sink_h) / Z_i (dL_i - D_i)
/// over the pairs that are seen, with dk and dv summed over the query heads that share them, and dsink over the batch. score' is the
/// derivative of the score function, by its text on dual numbers, or what its member `derivative` says. A view without memory is not
/// wanted. of_sinks: (1, heads, 1, 1). of_score(b, h, i, j, x, dx) is called for each pair, with positions, the scaled product x and the
/// gradient by what the score function makes of it, P_ij (sum_c dO[i,c] v[j,c] - D_i + dL_i): what gradients of its parameters are made of.
/// Shapes, pattern and score function are taken as checked.
template <class T>
void softmax_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& wanted,
                       const tensor_view<T>& of_sinks = {}, std::optional<double> scale = {},
                       const detail::pair_scores<T, true>& score = identity_score{}, const detail::visible_pairs& pattern = dense{},
                       std::span<const double> sinks = {}, const detail::pair_gradients<T>& of_score = {}) {
    const auto d_k = in.keys.shape().channels, d_v = in.values.shape().channels;
    const auto factor = detail::scale_of(in, scale);
    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &of_sinks}) attn::detail::fill_zero(*view);

    detail::for_each_softmax_row<T>(in, scale, score, pattern, sinks, [&](const detail::softmax_row<T>& r) {
        const auto b = r.batch, h = r.head, g = r.kv_head, row = r.row;
        T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, h, row, 0) : T{0}; // dL - D
        for (index_t c = 0; c < d_v; ++c) shift -= d_out.values(b, h, row, c) * r.mean(in.values, c);
        if (of_sinks.data() && r.sink != -std::numeric_limits<T>::infinity()) of_sinks(0, h, 0, 0) += r.of_sink / r.denominator * shift;
        for (const auto& k : r.seen) {
            const auto product =
                detail::sum_over<T>(d_v, [&](index_t c) { return d_out.values(b, h, row, c) * in.values(b, g, k.row, c); });
            const T of_this = k.weight * (product + shift), of_product = factor * k.score.derivative * of_this;
            if (of_score) of_score(b, h, in.positions.first_query[b] + row, in.positions.first_key[b] + k.row, k.product, of_this);
            for (index_t c = 0; wanted.values.data() && c < d_v; ++c)
                wanted.values(b, g, k.row, c) += k.weight * d_out.values(b, h, row, c);
            for (index_t c = 0; wanted.keys.data() && c < d_k; ++c) wanted.keys(b, g, k.row, c) += of_product * in.queries(b, h, row, c);
            for (index_t c = 0; wanted.queries.data() && c < d_k; ++c) wanted.queries(b, h, row, c) += of_product * in.keys(b, g, k.row, c);
        }
    });
}

} // namespace attn::reference
